"""Environments that lose a connection in any method of theirs: the episode starts again, and the run goes on."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem, ToolCall, Trajectory
from tasks.core.tool_calls import call_text
from tasks.engines.endpoint.episode import ChatReply, EndpointEpisodes
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey, EpisodeKind
from tasks.rollouts.episode import EngineEpisodes
from tasks.tools.base import EnvironmentFault
from tasks.tools.replay import Script, play
from tasks.tools.wrappers import EnvironmentWrapper
from tests import tiny
from tests.rollouts.agents import conftest as agents
from tests.rollouts.test_requests import NOTE, PROBLEM, ROOMY, Notebook
from tests.worlds import QUICK

TEXTS = ["<tool_call>\n{\n</tool_call>", NOTE, "One.", NOTE, "Two.", NOTE, "Three."]
PROBLEMS = [PROBLEM.model_copy(update={"id": f"n{number}"}) for number in range(3)]
METHODS = ["start", "start_user", "open", "answer", "call", "malformed_call", "end_turn", "verdict"]
ERRORS = [
    EnvironmentFault("it is away", tool="server"),
    ConnectionRefusedError("it is away"),
    EOFError("it is away"),
    httpx.ConnectError("it is away"),
]


class FailingOnce(EnvironmentWrapper):
    """The second time that an episode comes to the method, `error` is raised there."""

    def __init__(self, inner: Any, method: str, error: BaseException):
        super().__init__(inner)
        self.method, self.error, self.num_times = method, error, 0

    def start(self, problem: Problem, *, stream: str = "") -> Any:
        return Failing(self.try_method("start", self.inner.start)(problem, stream=stream), self)

    def start_user(self, problem: Problem, *, stream: str = "") -> Any:
        return Failing(self.try_method("start_user", self.inner.start_user)(problem, stream=stream), self)

    def try_method(self, name: str, method: Any) -> Any:
        self.num_times += name == self.method
        if name == self.method and self.num_times == 2:
            raise self.error
        return method


class Failing:
    """An episode or a user of it."""

    def __init__(self, inner: Any, environment: FailingOnce):
        self.inner, self.environment = inner, environment

    def __getattr__(self, name: str) -> Any:
        return self.environment.try_method(name, getattr(self.inner, name))


class Writer:
    """A ChatModel that writes the texts."""

    settings, name, num_answered = None, "writer", 0

    def ask(self, messages: list[dict[str, Any]], tools: Any) -> Future[ChatReply]:
        found: Future[ChatReply] = Future()
        found.set_result(ChatReply(TEXTS[sum(message["role"] == "assistant" for message in messages)]))
        return found

    def cost(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """It costs nothing."""

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def by_engine(chat: ChatFormat) -> EpisodeKind[Any]:
    texts = [[chat.encode(text) for text in TEXTS]]
    return EngineEpisodes(ScriptedEngine(texts, end_of_turn=chat.end_of_turn), chat, ROOMY)


def by_endpoint(chat: ChatFormat) -> EpisodeKind[Any]:
    model: Any = Writer()
    return EndpointEpisodes(model, max_turns=9)


def collect(kind: EpisodeKind[Any], environment: Any) -> tuple[list[Trajectory], dict[str, float]]:
    collector = Collector(kind, environment, max_concurrent_episodes=2, seed=0, stage="test")
    return collector.collect([EpisodeKey(problem, 0, 0) for problem in PROBLEMS]), collector.counts()


@pytest.mark.parametrize("kind", [by_engine, by_endpoint])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", METHODS)
def test_a_lost_connection_restarts_one_episode_whichever_method_meets_it(
    method: str, error: Exception, kind: Callable[[ChatFormat], EpisodeKind[Any]], chat: ChatFormat
):
    played, counts = collect(kind(chat), FailingOnce(Notebook(QUICK), method, error))
    assert [(t.outcome, t.fault, t.num_calls) for t in played] == [("success", None, 4)] * 3
    assert (counts["episode_restarts"], counts["episodes_dropped"]) == (1, 0)


@pytest.mark.parametrize("kind", [by_engine, by_endpoint])
def test_a_connection_that_is_lost_at_the_close_changes_nothing(
    kind: Callable[[ChatFormat], EpisodeKind[Any]], chat: ChatFormat
):
    played, counts = collect(kind(chat), FailingOnce(Notebook(QUICK), "close", ConnectionError("it is away")))
    assert [t.outcome for t in played] == ["success"] * 3
    assert counts["episode_restarts"] == 0


@pytest.mark.parametrize(
    "error",
    [ValueError("no such world"), KeyError("a bug"), FileNotFoundError("no such file"), OSError(errno.ENOSPC, "full")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("method", [*METHODS, "close"])
def test_a_refusal_a_bug_a_missing_file_and_a_full_disk_end_the_run(method: str, error: Exception, chat: ChatFormat):
    with pytest.raises(type(error), match=re.escape(str(error))):
        collect(by_engine(chat), FailingOnce(Notebook(QUICK), method, error))


@pytest.mark.parametrize("method", ["start", "start_user", "open", "answer", "end_turn", "verdict", "close"])
def test_a_method_that_would_end_the_program_ends_it_as_an_error(method: str, chat: ChatFormat):
    with pytest.raises(RuntimeError, match=rf"\w+\.{method} would end the program"):
        collect(by_engine(chat), FailingOnce(Notebook(QUICK), method, SystemExit(0)))


def test_a_lost_connection_is_told_with_the_line_that_met_it(chat: ChatFormat):
    world = FailingOnce(Notebook(QUICK.model_copy(update={"max_attempts": 1})), "start", ERRORS[1])
    played, _ = collect(by_engine(chat), world)
    assert [t.outcome for t in played].count("environment_error") == 1
    (fault,) = (t.fault for t in played if t.fault)
    assert "test_lost_connections.py:" in fault
    assert fault.endswith("with ConnectionRefusedError: it is away")


@pytest.mark.parametrize("method", ["start", "call", "malformed_call", "end_turn", "verdict"])
def test_a_script_is_played_again_after_a_lost_connection(method: str):
    note = [ToolCall(name="note", arguments={"text": "a"})]
    script = Script(PROBLEM, [([None, *note], "One."), (note, "Two."), (note, "Three.")])
    for error in ERRORS:
        world: Any = FailingOnce(Notebook(QUICK), method, error)
        played = play(world, [script] * 2)
        assert [item.verdict and item.verdict.success for item in played] == [True, True]
        assert world.num_times >= 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "call", "verdict"])
def test_an_agent_in_a_world_that_loses_a_connection_is_started_again(method: str, chat: ChatFormat):
    problems = [problem for problem in tiny.problems(34) if len(problem.requests) == 1][:2]
    texts: dict[str, Sequence[str]] = {
        problem.requests[0]: [*map(call_text, problem.reference[0].calls), "Done."] for problem in problems
    }
    world: Any = agents.agent_world()
    world.inner = FailingOnce(world.inner, method, ConnectionError("it is away"))
    played = agents.collect(world, agents.Imitator(chat, texts), chat, problems)
    assert [t.fault for t in played] == [None, None]
    assert world.inner.num_times >= 3
