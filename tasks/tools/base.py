"""The protocol of an environment: it makes Episodes, and an Episode answers tool calls and gives the final verdict.

An environment is made once per process and does not change. All state is in the Episode, one per trajectory, so that
episodes never touch each other.

An answer is there at once (a tool that computes in memory) or it is a Future (a tool that waits), so that hundreds of
episodes can wait at the same time, and an environment in memory needs no event loop.

There are two kinds of failure. A call that the *model* got wrong gets a reply it can recover from. What *we* got wrong,
such as a server that is down, is an EnvironmentFault: retried, then dropped, and never rewarded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from tasks.core.records import Demonstration, Problem, ReferenceTurn
from tasks.tools.settings import ToolSettings

ErrorType = Literal[
    "invalid_arguments", "unknown_tool", "not_found", "conflict",  # the call was at fault
    "rate_limited", "timeout", "unavailable",  # the tool was: ours
]  # fmt: skip
FaultType = Literal["rate_limited", "timeout", "unavailable"]
Waited = TypeVar("Waited")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as a model sees it: name, one-line description, JSON Schema of its arguments; and how it may be treated.

    `read_only` changes nothing, `idempotent` changes nothing more when it is called again: only such a call is made
    again after a fault. `stateless` answers from its arguments alone, so that one stored reply serves every episode.
    `version` is the tool's own; a change of it is a drift of the environment.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    read_only: bool = False
    idempotent: bool = False
    stateless: bool = False
    version: str = "1"
    output_schema: Mapping[str, Any] | None = None

    def schema(self) -> dict[str, Any]:
        """The function-calling form that chat templates and OpenAI-compatible servers expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def may_repeat(self) -> bool:
        """Whether a call that may or may not have happened can be made again without harm."""
        return self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool answered, as the text the model reads.

    `valid` is False where the call itself was at fault; `error` names the type where the text is an error envelope.
    `num_retries` counts the calls that failed before this one answered; the model sees nothing of them.
    """

    text: str
    valid: bool = True
    error: ErrorType | None = None
    num_retries: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's own judgement of an episode: success, each check it consists of, and what more there is to say
    of it (JSON), such as which part of the state differs.
    """

    success: bool
    checks: dict[str, bool] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def error_text(type: ErrorType, message: str) -> str:
    """The envelope of an error, which a model reads as a reply."""
    return json.dumps({"error": {"type": type, "message": message}}, ensure_ascii=False)


class EnvironmentFault(Exception):
    """The environment failed, not the model: the episode is retried, then dropped, and never rewarded.

    `tool` is the tool to blame, or what else failed ("server", "judge"); `num_retries` the calls repeated in place.
    """

    def __init__(self, message: str, *, tool: str = "environment", type: FaultType = "unavailable"):
        super().__init__(message)
        self.message, self.tool, self.type = message, tool, type
        self.num_retries = 0

    def __str__(self) -> str:
        return f"{self.tool}: {self.type}: {self.message}"


Answer = ToolReply | Future[ToolReply]


class Episode(Protocol):
    """One back end for one trajectory. Its calls are made one after another, never two at once."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Answer a call. Whatever the model wrote, this never raises for it: a bad call is a reply to recover from.
        EnvironmentFault, here or from the Future, where the environment failed.
        """
        ...

    def malformed_call(self) -> ToolReply:
        """Answer a message that tried to call a tool but could not be parsed."""
        ...

    def end_turn(self, message: str | None) -> None:
        """The agent closed a user request with `message`, and the user makes another."""
        ...

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        """Judge the episode; `final_message` is None where it ended on a limit."""
        ...

    def close(self) -> None:
        """The episode is over or abandoned: give back what it holds (a server, a session). Never waits or raises."""
        ...


Halves = tuple[frozenset[str], frozenset[str]]  # the ids a publication trained on, and those it held out
Expert = Callable[[Problem, random.Random], Demonstration | None]  # an episode without errors; None shows nothing


@dataclass(frozen=True, slots=True)
class SourceCount:
    """How many problems `generate` must give, counted without it; `left_out` has the omitted ids by reason."""

    num_problems: int
    left_out: Mapping[str, Sequence[str]]


class Environment(Protocol):
    """The tools and their episodes. A class derived from this one also has a classmethod
    `from_settings(settings, tools)`, which makes it from its own settings (None where it has none) and ToolSettings.

    The methods from `tools_for` on have a default: an environment overrides those that it has something to say to.
    """

    name: str
    limits: ToolSettings

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        """A fresh episode, a function of the problem alone. ValueError where `problem.world` does not fit.

        `stream` names the attempt (draw, sample, attempt). Wrappers that add chance, such as faults on purpose, draw
        from it, so that chance depends on the episode and never on the time it runs.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What the tools are made of, as JSON: schemas, versions, data, seed scheme."""
        ...

    def fingerprint(self) -> str:
        """Hash of `describe()`. Environments with equal fingerprints are the same."""
        ...

    def counts(self) -> dict[str, int]:
        """Running totals for the log, such as hits and misses of the tool cache."""
        return {}

    def close(self) -> None:
        """Release what the process keeps for this environment: servers, sessions, open files."""
        return

    def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
        """The tools that a model is shown for a problem."""
        return self.tools

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem] | None:
        """Problems from a seed, deterministic, categories in equal numbers; None where problems come from a file."""
        return None

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount | None:
        """What `generate` must give with the same arguments, where the source has a known size."""
        return None

    def published_halves(self) -> Halves | None:
        """The split of a publication, where `curate.split: published` can repeat one."""
        return None

    def expert(self) -> Expert | None:
        """Who plays the demonstrations of a warm start; None shows the reference solutions."""
        return None

    def vocabulary(self) -> list[str]:
        """Words its messages may contain. The embedded model's tokenizer makes each one token."""
        return []

    def baselines(self, problem: Problem) -> Mapping[str, Sequence[ReferenceTurn]]:
        """Policies without a model by name, and what each does for every user request."""
        return {}

    def find_problem(self, problem_id: str) -> Problem | None:
        """The problem of an id; ValueError where there is none. None: look among the problems of `curate`."""
        return None

    def starts_afresh(self) -> bool:
        """Whether an episode finds nothing that an earlier one left."""
        return True

    def is_live(self) -> bool:
        """Whether tools may answer differently the second time without a fault of theirs, as a clock does."""
        return False


def await_in_steps(answer: Waited | Future[Waited]) -> Generator[Future[Any], None, Waited]:
    """The answer itself, for use with `yield from` in a generator that yields what it has to wait for."""
    if isinstance(answer, Future):
        yield answer
        return answer.result()
    return answer


def block_until(answer: Waited | Future[Waited]) -> Waited:
    """The answer itself, waited for where it is a Future: for code that plays one episode at a time."""
    return answer.result() if isinstance(answer, Future) else answer
