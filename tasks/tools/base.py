"""The protocol of an environment: it starts Episodes, and an Episode answers tool calls and gives the verdict.

An environment is made once per process and does not change; all state is in the Episode, one per trajectory. An answer
is a value (a tool in memory) or a Future (a tool that waits), so that hundreds of episodes can wait at once.

Two kinds of failure: a mistake of the model gets a reply it can recover from; a failure of ours, such as a server that
is down, is an EnvironmentFault: retried, then dropped, never rewarded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from tasks.core.records import Demonstration, Problem, ReferenceTurn
from tasks.core.text import one_line
from tasks.tools.settings import ToolSettings

FaultType = Literal["rate_limited", "timeout", "unavailable"]  # the tool failed: an environment fault
ErrorType = Literal["invalid_arguments", "unknown_tool", "not_found", "conflict", FaultType]  # first the call's faults
MAX_FAULT_CHARACTERS = 2000
Waited = TypeVar("Waited")
TOO_MANY = "a message may make at most {} calls; this one and those after it were not made"
REPLAY = "/replay "  # after it a user's stream has the number of its replay; before it, the episode's own stream


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: name, one-line description, JSON Schema of its arguments, and how calls may be treated.

    `read_only`: changes nothing. `idempotent`: a repeated call changes nothing more. Only such tools are called again
    after a fault. `stateless`: the reply depends on the arguments alone, so one stored reply serves every episode. A
    change of `version` is drift.
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
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def may_repeat(self) -> bool:
        """Whether repeating a call that may have happened does no harm."""
        return self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class ToolReply:
    """The text that the model reads. `valid` is False if the call itself was wrong; `error` is the type if the text is
    an error envelope; `num_retries` counts failed attempts, which the model does not see.
    """

    text: str
    valid: bool = True
    error: ErrorType | None = None
    num_retries: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's judgement of an episode: success, its checks, and details as JSON, such as differing state."""

    success: bool
    checks: dict[str, bool] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.success) is not bool:
            raise ValueError(
                f"Verdict(success={self.success!r:.60}) is not True or False, so a share of the problem would count "
                f"as all of it. Compare it, as in share == 1.0; partial credit belongs in reward.parts of params.yaml"
            )
        if not isinstance(self.checks, dict) or any(type(value) is not bool for value in self.checks.values()):
            raise ValueError(
                f"Verdict(checks={self.checks!r:.60}) is no dict of True and False: make each a comparison"
            )


def error_text(type: ErrorType, message: str) -> str:
    return json.dumps({"error": {"type": type, "message": message}}, ensure_ascii=False)


class EnvironmentFault(Exception):
    """The environment failed, not the model. `tool` is what failed: a tool, "server", "judge" or "user"."""

    def __init__(self, message: str, *, tool: str = "environment", type: FaultType = "unavailable"):
        message = one_line(message, MAX_FAULT_CHARACTERS)  # it may quote a tool, whose line ends would forge ours
        super().__init__(message)
        self.message, self.tool, self.type = message, tool, type
        self.num_retries = 0
        self.may_pass = True  # False: the same call would fail again

    def __str__(self) -> str:
        return f"{self.tool}: {self.type}: {self.message}"


Answer = ToolReply | Future[ToolReply]


class Episode(Protocol):
    """The state behind one trajectory. Calls come one at a time."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """A wrong call gets a reply, never an error; EnvironmentFault, also in the Future, if we failed."""
        ...

    def malformed_call(self) -> Answer:
        """Answer a message that tried to call a tool and could not be parsed (`CallFormat.reword`)."""
        ...

    def end_turn(self, message: str | None) -> None:
        """The agent answered a user request with `message`, and the user makes another."""
        ...

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        """Judge the episode; `final_message` is None if it ended on a limit."""
        ...

    def close(self) -> None:
        """Release the episode's server or session. Never waits or raises."""
        ...


class User(Protocol):
    """Who speaks to the agent in one episode. EnvironmentFault, also in the Future, if the user cannot be reached."""

    def open(self) -> str | Future[str]:
        """The first message."""
        ...

    def answer(self, message: str) -> str | Future[str | None] | None:
        """What the user says to a message that makes no call; None: the user is done."""
        ...


class ToldRequests:
    """A User who makes requests in order, whatever the agent says; with `on_request` only while the agent asks."""

    def __init__(self, requests: Sequence[str], *, on_request: bool = False):
        self.requests, self.on_request, self.num_told = requests, on_request, 0

    def open(self) -> str:
        self.num_told = 1
        return self.requests[0]

    def answer(self, message: str) -> str | None:
        """The next request. A message asks if it contains a question mark."""
        if self.num_told == len(self.requests) or (self.on_request and "?" not in message):
            return None
        self.num_told += 1
        return self.requests[self.num_told - 1]


Halves = tuple[frozenset[str], frozenset[str]]  # the ids a publication trained on, and the held-out ids
Expert = Callable[[Problem, random.Random], Demonstration | None]  # an episode without errors, or None


@dataclass(frozen=True, slots=True)
class SourceCount:
    """How many problems `generate` must return, counted without it; `left_out`: omitted ids by reason."""

    num_problems: int
    left_out: Mapping[str, Sequence[str]]


class Environment(Protocol):
    """The tools and their episodes. A subclass also has a classmethod `from_settings(settings, tools)`: its own
    settings (or None) and ToolSettings. From `tools_for` on, each method has a default.
    """

    name: str
    limits: ToolSettings

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        """A new episode, a function of the problem alone. ValueError if `problem.world` does not fit. `stream` names
        the attempt (draw, sample, attempt): wrappers seed their randomness with it, so that it never depends on time.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """The tools as JSON: schemas, versions, data, seed scheme."""
        ...

    def fingerprint(self) -> str:
        """Hash of `describe()`; equal for equal environments."""
        ...

    def counts(self) -> dict[str, int]:
        """Running totals for the log, such as cache hits and misses."""
        return {}

    def close(self) -> None:
        """Release servers, sessions and open files."""
        return

    def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
        """The tools that a model sees for a problem; where there are none, no message of it is a call."""
        return self.tools

    def rules_for(self, problem: Problem) -> str:
        """What a model reads before the user's first message, such as a company's policy; empty: nothing."""
        return ""

    def budgets_for(self, problem: Problem) -> Mapping[str, int]:
        """Budgets of `sampling` that are lower for this problem's episodes, by name."""
        return {}

    def member_of(self, problem_id: str) -> str | None:
        """The environment of a mixture that a problem is from, by its label there; None: there is only one."""
        return None

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem] | None:
        """Problems from a seed, equally many per category; None if problems come from a file."""
        return None

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount | None:
        """What `generate` must return with the same arguments, if the source has a known size."""
        return None

    def published_halves(self) -> Halves | None:
        """A published split, for `curate.split: published`."""
        return None

    def start_user(self, problem: Problem, *, stream: str = "") -> User:
        """Who speaks in an episode; `stream` is that of `start`."""
        return ToldRequests(problem.requests)

    def check_user(self, problem: Problem) -> None:
        """ValueError where `start_user` would refuse this problem; asked before the first episode."""
        return

    def user_guidelines(self, problem: Problem) -> str:
        """All that a model reads who plays this problem's user, for `user.model.instructions: null`; empty: none."""
        return ""

    def shards(self, problem: Problem) -> Sequence[str]:
        """The problem's only request in parts, which a user tells one after the other; fewer than two: it has none."""
        return ()

    def judges_each_request(self, problem: Problem) -> bool:
        """Whether each of its requests is judged by what the agent did after it; then no user may word them anew."""
        return False

    def expert(self) -> Expert | None:
        """Who plays the demonstrations of a warm start; None: the reference solutions."""
        return None

    def thoughts(self, demonstration: Demonstration) -> list[str]:
        """What an expert might think before each message of a demonstration; empty: it tells no thoughts."""
        return []

    def vocabulary(self) -> list[str]:
        """Words in its messages; each is one token of the embedded model's tokenizer."""
        return []

    def baselines(self, problem: Problem) -> Mapping[str, Sequence[ReferenceTurn]]:
        """Scripted policies by name, and their turns for each user request."""
        return {}

    def find_problem(self, problem_id: str) -> Problem | None:
        """The problem with this id; ValueError if there is none. None: search the problems of `curate`."""
        return None

    def knows_solution(self, problem: Problem) -> bool:
        """Whether the problem's reference is claimed to score 1; else nobody knows a solution, and none is asked."""
        return True

    def starts_afresh(self) -> bool:
        """Whether an episode sees nothing of earlier ones."""
        return True

    def cheaper_starts(self) -> str:
        """How its episodes could start faster, where most of their time so far was their starts; empty: no way."""
        return ""

    def is_driven_by_agent(self) -> bool:
        """Whether an agent drives its episodes and asks an endpoint for turns (`driven.py`)."""
        return False

    def is_live(self) -> bool:
        """Whether replies may differ without a fault, as a clock's do."""
        return False


def await_in_steps(answer: Waited | Future[Waited]) -> Generator[Future[Any], None, Waited]:
    """The answer, by `yield from`, in a generator that yields the Futures it waits for."""
    if isinstance(answer, Future):
        yield answer
        return answer.result()
    return answer


def block_until(answer: Waited | Future[Waited]) -> Waited:
    """The answer; blocks on a Future, for code that plays one episode at a time."""
    return answer.result() if isinstance(answer, Future) else answer
