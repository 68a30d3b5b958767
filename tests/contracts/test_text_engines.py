"""One reduced contract over the policies that nothing is trained on: the scripted engine, and a model behind an
endpoint that hands calls over structured or leaves them in its text. The same words end the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.endpoint.episode import EndpointEpisodes
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.authoring import tool
from tasks.tools.base import Environment, EnvironmentFault
from tests import tiny
from tests.engines.endpoint.chat_endpoint import CONTEXT_CHARACTERS, KEY, VARIABLE, ChatEndpoint, settings
from tests.rollouts.test_requests import NOTE, PROBLEM, ROOMY, Notebook
from tests.worlds import QUICK

pytestmark = pytest.mark.slow

Scripts = Sequence[tuple[Problem, list[str]]]
UNKNOWN = call_text(ToolCall(name="burn", arguments={}))
WRONG = call_text(ToolCall(name="note", arguments={"text": 3}))
MALFORMED = "<tool_call>\n{\n</tool_call>"


class Player:
    """Plays scripts with one of the policies."""

    def __init__(self, kind: str, chat: ChatFormat):
        self.kind, self.chat = kind, chat

    def __call__(self, scripts: Scripts, environment: Environment, *, max_turns: int = 9) -> list[Trajectory]:
        keys = [EpisodeKey(problem, 0, 0) for problem, _ in scripts]
        shared: dict[str, Any] = {"max_concurrent_episodes": 4, "seed": 0, "stage": "test"}
        if self.kind == "scripted":
            written = [[self.chat.encode(text) for text in texts] for _, texts in scripts]
            engine = ScriptedEngine(written, end_of_turn=self.chat.end_of_turn)
            sampling = ROOMY.model_copy(update={"max_turns": max_turns})
            return Collector(EngineEpisodes(engine, self.chat, sampling), environment, **shared).collect(keys)
        by_request = {problem.requests[0]: texts for problem, texts in scripts}
        served = ChatEndpoint(by_request, structured=self.kind == "openai, structured")
        with served.serving() as url, closing(Endpoint(settings(url))) as endpoint:
            return Collector(EndpointEpisodes(endpoint, max_turns=max_turns), environment, **shared).collect(keys)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


@pytest.fixture(params=["scripted", "openai, structured", "openai, text"])
def play(request: pytest.FixtureRequest, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> Player:
    monkeypatch.setenv(VARIABLE, KEY)
    return Player(request.param, chat)


def reference_texts(problem: Problem) -> list[str]:
    (turn,) = problem.reference
    return [*map(call_text, turn.calls), turn.answer]


def test_reference_solutions_succeed_and_results_come_in_the_order_of_the_keys(play: Player) -> None:
    problems = {problem.requests[0]: problem for problem in tiny.problems(12, max_level=4)}.values()
    played = play([(problem, reference_texts(problem)) for problem in problems], TravelDesk(), max_turns=20)
    assert [trajectory.problem_id for trajectory in played] == [problem.id for problem in problems]
    assert {trajectory.outcome for trajectory in played} == {"success"}
    assert [t.num_calls for t in played] == [len(problem.reference[0].calls) for problem in problems]
    assert {trajectory.environment_fingerprint for trajectory in played} == {TravelDesk().fingerprint()}


def test_an_answer_without_the_work_is_a_failure(play: Player) -> None:
    (played,) = play([(tiny.problems(1)[0], ["The refund is 0."])], TravelDesk())
    assert (played.outcome, played.limit, played.num_calls) == ("failure", None, 0)
    assert played.turns[0].text == "The refund is 0."


def test_running_out_of_turns_is_an_ordinary_failure(play: Player) -> None:
    (played,) = play([(PROBLEM, [NOTE] * 3)], Notebook(QUICK), max_turns=3)
    assert (played.outcome, played.limit, len(played.turns)) == ("max_turns", "max_turns", 3)
    assert played.details["messages"] == [None]


def test_each_closing_message_is_followed_by_the_next_request(play: Player) -> None:
    (played,) = play([(PROBLEM, [NOTE, "One.", NOTE, NOTE, "Two.", NOTE, "Three."])], Notebook(QUICK))
    assert (played.outcome, len(played.turns), played.num_calls) == ("success", 7, 4)
    assert [turn.follow_up for turn in played.turns] == [None, "Then.", None, None, "Last.", None, None]
    assert [turn.replies for turn in played.turns] == [["1 1"], [], ["2 1"], ["2 2"], [], ["3 1"], []]
    assert played.details["messages"] == ["One.", "Two.", "Three."]


def test_what_a_model_gets_wrong_is_a_reply_it_can_recover_from(play: Player) -> None:
    texts = [f"{NOTE}{UNKNOWN}", WRONG, MALFORMED, NOTE, "One.", NOTE, "Two.", NOTE, "Three."]
    (played,) = play([(PROBLEM, texts)], Notebook(QUICK))
    assert [turn.errors for turn in played.turns[:4]] == [
        [None, "unknown_tool"], ["invalid_arguments"], ["invalid_arguments"], [None],
    ]  # fmt: skip
    assert (played.outcome, played.num_calls, played.num_invalid_calls) == ("success", 7, 3)
    assert played.turns[2].calls == [{"malformed": True}]
    assert Trajectory.from_row(played.to_row()) == played


def test_a_reply_cut_at_its_limit_is_answered_and_the_episode_goes_on(play: Player) -> None:
    (played,) = play([(PROBLEM, ["z" * 500, NOTE, "One.", NOTE, "Two.", NOTE, "Three."])], Notebook(QUICK))
    assert (played.turns[0].stop_reason, played.turns[0].errors) == ("max_tokens_per_turn", ["invalid_arguments"])
    assert played.outcome == "success"


def test_a_conversation_that_outgrows_its_limit_is_overlong_and_no_success(play: Player) -> None:
    long = Notebook(QUICK)
    texts = [call_text(ToolCall(name="note", arguments={"text": "y" * 60}))] * (CONTEXT_CHARACTERS // 60)
    (played,) = play([(PROBLEM, texts)], long, max_turns=99)
    assert (played.outcome, played.limit) == ("overlong", "max_tokens_per_episode")
    assert len(played.turns) > 2


class Unsteady(Notebook):
    """Its tool fails the first `num_failures` times, whatever episode asks, and takes its time."""

    num_failures = 0

    class Episode(Notebook.Episode):
        @tool("Keeps a text.")
        async def note(self, text: str) -> str:  # type: ignore[override]
            await asyncio.sleep(0.01)
            if Unsteady.num_failures:
                Unsteady.num_failures -= 1
                raise EnvironmentFault("it is down", tool="note")
            self.notes[-1].append(text)
            return "kept"

    episode_class = Episode


@pytest.mark.parametrize(("num_failures", "outcome"), [(2, "success"), (3, "environment_error")])
def test_a_fault_of_the_environment_is_retried_then_dropped(play: Player, num_failures: int, outcome: str) -> None:
    """Three attempts: two failures are forgiven, the third drops the episode and says why."""
    Unsteady.num_failures = num_failures
    (played,) = play([(PROBLEM, [NOTE, "One.", NOTE, "Two.", NOTE, "Three."])], Unsteady(QUICK))
    assert played.outcome == outcome
    assert played.fault == ("note: unavailable: it is down" if outcome == "environment_error" else None)


def test_a_slow_tool_holds_up_only_its_own_episode(play: Player) -> None:
    """The first of two waits for its tool; both end as they should, in their order."""
    Unsteady.num_failures = 0
    other = PROBLEM.model_copy(update={"id": "m", "requests": ["Only."]})
    scripts: Scripts = [(PROBLEM, [NOTE, "One.", NOTE, "Two.", NOTE, "Three."]), (other, ["Nothing to note."])]
    played = play(scripts, Unsteady(QUICK))
    assert [(t.problem_id, t.outcome) for t in played] == [("n", "success"), ("m", "failure")]
