"""The check of an agent that drives itself: what the reference's answer and an answer of nonsense come to."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.commands.doctor.agents import NONSENSE, agent_plays, is_judged_by_agent
from tasks.commands.doctor.context import PlayedReference
from tasks.core.records import Problem, ReferenceTurn
from tasks.environments.agent.settings import AgentSettings
from tests.rollouts.agents.conftest import VERDICT, agent_settings

PROBLEM = Problem(
    id="s41",
    category="order",
    split_group="g",
    level=1,
    world={},
    requests=["Order a bolt."],
    reference=[ReferenceTurn(calls=[], answer="A bolt is ordered.")],
)
ERRAND = AgentSettings(**agent_settings(world=None, verdict=VERDICT))


def played(*, success: bool = False, fault: str | None = None, begun: Sequence[str] = ()) -> Any:
    outcome = "success" if success else "failure"
    sequences = [SimpleNamespace(begun=why) for why in ("", *begun)]
    return SimpleNamespace(outcome=outcome, fault=fault, is_success=success, limit=None, turns=[0], sequences=sequences)


def looked(settings: AgentSettings, *, reference: Any, nonsense: Any) -> tuple[str, str]:
    """Result and finding, where the agent's two episodes come to this."""
    context: Any = SimpleNamespace(
        environment=SimpleNamespace(is_driven_by_agent=lambda: True),
        references=[PlayedReference("train", PROBLEM, ["A bolt is ordered."], reference)],
        settings=SimpleNamespace(environment=SimpleNamespace(settings=settings)),
        play_by_agent=lambda asked: nonsense if asked.texts == [NONSENSE] else reference,
    )
    assert is_judged_by_agent(context) == (settings.world is None)
    finding = agent_plays(context)
    return finding.result, finding.text


@pytest.mark.parametrize(
    ("reference", "nonsense", "result", "says"),
    [
        (played(success=True), played(), "pass", "s41: it ended in success after 1 turn, in 1 sequence; an answer"),
        (played(), played(), "warn", "its verdict refuses the reference's own answer"),
        (played(success=True), played(success=True), "warn", "succeeds with the answer"),
        (played(fault="crashed"), played(), "fail", "s41: it ended in failure: crashed"),
        (played(success=True), played(fault="it returned None"), "fail", "nonsense: it returned None"),
    ],
)
def test_an_agent_and_its_verdict_are_asked_with_the_right_answer_and_with_nonsense(
    reference: Any, nonsense: Any, result: str, says: str
) -> None:
    found = looked(ERRAND, reference=reference, nonsense=nonsense)
    assert found[0] == result and says in found[1]


def test_in_a_world_the_references_own_calls_are_judged_elsewhere() -> None:
    found = looked(AgentSettings(**agent_settings()), reference=played(), nonsense=played())
    assert found[0] == "pass" and "it ended in failure" in found[1]


def test_one_problem_of_each_number_of_requests_is_played_and_edited_histories_are_told() -> None:
    """Of two requests, the agent sends another history than it was answered to."""
    twice = PROBLEM.model_copy(update={"id": "s42", "requests": ["Order a bolt.", "And a nut."]})
    longer = PROBLEM.model_copy(update={"id": "s43"})
    played_by_id = {"s41": played(success=True), "s42": played(success=True, begun=["edited_history"])}
    context: Any = SimpleNamespace(
        environment=SimpleNamespace(is_driven_by_agent=lambda: True),
        references=[
            PlayedReference("train", problem, ["Done."] * length, played())
            for problem, length in ((longer, 3), (twice, 2), (PROBLEM, 1))
        ],
        settings=SimpleNamespace(environment=SimpleNamespace(settings=ERRAND)),
        play_by_agent=lambda asked: played() if asked.texts == [NONSENSE] else played_by_id[asked.problem.id],
    )
    finding = agent_plays(context)
    assert finding.result == "pass" and "s43" not in finding.text
    assert "s41: it ended in success after 1 turn, in 1 sequence; s42: it" in finding.text
    assert "2 sequences, begun anew by edited_history: no demonstration has such a turn" in finding.text
