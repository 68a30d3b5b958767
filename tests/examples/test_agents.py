"""Agents that others wrote play the travel desk through the gateway, each in an environment of its own.

`make setup-agents` installs them. Their programs are those of infra/examples/agents, as a user would run them; a
scripted policy plays the references.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.gateway.completions import Completion, CompletionRequest
from tasks.rollouts.agents.kind import AgentEpisodes
from tasks.rollouts.agents.transcript import Transcript
from tests import tiny
from tests.agents_of_others import python_of
from tests.conftest import ROOT
from tests.rollouts.agents.conftest import Imitator, agent_world, collect, reference_texts

pytestmark = pytest.mark.agents

NUM_PROBLEMS = 3
SHOWN = tiny.EMBEDDED.model_copy(update={"tools_in_prompt": True})
ROOMY = tiny.ROOMY.model_copy(update={"max_tokens_per_episode": 100_000, "max_tokens_per_turn": 1000})


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(SHOWN), source="test")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    generated = TravelDesk().generate(seed=5, num_problems=40, max_level=2)
    return [problem for problem in generated if len(problem.requests) == 1][:NUM_PROBLEMS]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[CompletionRequest]]:
    """What agents ask for, in order, by problem."""
    noted: dict[str, list[CompletionRequest]] = defaultdict(list)
    complete = AgentEpisodes.complete

    def note(self: AgentEpisodes, key: str, request: CompletionRequest) -> Future[Completion]:
        noted[self.by_key[key].key.problem.id].append(request)
        return complete(self, key, request)

    monkeypatch.setattr(AgentEpisodes, "complete", note)
    return noted


def play(name: str, chat: ChatFormat, problems: list[Problem], texts: Any = reference_texts) -> list[Trajectory]:
    program = ROOT / "infra" / "examples" / "agents" / f"with_{name.replace('-', '_')}.py"
    engine = Imitator(chat, {problem.requests[0]: texts(problem) for problem in problems})
    world = agent_world(object=None, command=[python_of(name), str(program)])
    return collect(world, engine, chat, problems, sampling=ROOMY)


@pytest.mark.parametrize("name", ["openai-agents", "langgraph"])
def test_an_agent_whose_history_grows_has_one_sequence_and_its_requests_render_to_the_recorded_ids(
    name: str, chat: ChatFormat, problems: list[Problem], asked: dict[str, list[CompletionRequest]]
):
    played = play(name, chat, problems)
    assert len(played) == NUM_PROBLEMS
    for trajectory in played:
        assert (trajectory.outcome, len(trajectory.sequences)) == ("success", 1)
        check_ids(trajectory, asked[trajectory.problem_id], chat)


def test_smolagents_writes_its_history_anew_so_each_request_is_a_sequence_and_renders_to_its_ids(
    chat: ChatFormat, problems: list[Problem], asked: dict[str, list[CompletionRequest]]
):
    """It sends calls and replies back as text, and ends with a call of its own."""

    def texts(problem: Problem) -> list[str]:
        *calls, answer = reference_texts(problem)
        return [*calls, call_text(ToolCall(name="final_answer", arguments={"answer": answer}))]

    played = play("smolagents", chat, problems, texts)
    assert len(played) == NUM_PROBLEMS
    for trajectory in played:
        assert trajectory.outcome == "success"
        assert [sequence.begun for sequence in trajectory.sequences] == [
            "", *["edited_history"] * (len(trajectory.turns) - 1)
        ]  # fmt: skip
        check_ids(trajectory, asked[trajectory.problem_id], chat)


@pytest.mark.parametrize("name", ["openai-agents", "langgraph", "smolagents"])
def test_what_the_model_gets_wrong_is_its_failure_and_no_crash_of_the_agent(
    name: str, chat: ChatFormat, problems: list[Problem]
):
    """A tool that is not there, wrong arguments, and the same call until the turns are used up."""
    wrong = [ToolCall(name="fly", arguments={}), ToolCall(name="convert_currency", arguments={"amount": "much"})]
    again = call_text(ToolCall(name="get_nearest_airport_by_city", arguments={"location": "Rome"}))
    (played,) = play(name, chat, problems[:1], lambda problem: [*map(call_text, wrong), *[again] * 20])
    assert played.outcome in ("failure", "max_turns")
    assert len(played.turns) > 2 or name == "openai-agents"  # which gives up at the first


def check_ids(trajectory: Trajectory, requests: list[CompletionRequest], chat: ChatFormat) -> None:
    """Each request, rendered whole and without a record, is what was recorded up to where its turn was sampled."""
    assert len(requests) == len(trajectory.turns)
    for request, turn in zip(requests, trajectory.turns, strict=True):
        sequence = trajectory.sequences[turn.sequence]
        rendered = Transcript(chat).place(request.messages, request.tools).prompt
        assert sequence.token_ids[: len(rendered)] == rendered
        written = sequence.token_ids[len(rendered) :]
        assert chat.decode(written).startswith(turn.text)
        num_written = len(chat.encode(turn.text))
        assert all(sequence.sampled_mask[len(rendered) : len(rendered) + num_written])
        assert not sequence.sampled_mask[len(rendered) - 1]
