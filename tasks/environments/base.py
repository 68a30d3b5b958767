"""The protocol of a world: an Environment makes Episodes; an Episode answers tool calls and gives the final verdict.

An environment is everything outside the model: tools, the state they change, and the check of success. It is made once
a process and is immutable; all state is in the Episode, one a trajectory, so that episodes never touch each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.records import Demonstration, Problem


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as a model sees it: name, one-line description, JSON Schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def schema(self) -> dict[str, Any]:
        """The function-calling form that chat templates and OpenAI-compatible servers expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool answered, as the text the model reads. `valid` is False where the call itself was at fault."""

    text: str
    valid: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's own judgement of an episode: success, and each check it consists of."""

    success: bool
    checks: dict[str, bool]


class EnvironmentFault(Exception):
    """The environment failed, not the model: the episode is retried, then dropped, and never rewarded."""


class Episode(Protocol):
    """One back end for one trajectory."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Answer a call. Whatever the model wrote, this never raises for it: a bad call is a reply to recover from."""
        ...

    def malformed_call(self) -> ToolReply:
        """Answer a message that tried to call a tool but could not be parsed."""
        ...

    def verdict(self, final_message: str | None) -> Verdict:
        """Judge the episode; `final_message` is None where it ended on a limit."""
        ...


class Environment(Protocol):
    """A world: its tools and its episodes."""

    name: str

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    def start(self, problem: Problem) -> Episode:
        """A fresh episode, a function of the problem alone. ValueError where `problem.world` does not fit."""
        ...

    def fingerprint(self) -> str:
        """Hash of what lies behind the tools: schemas, versions, data, seed scheme."""
        ...


class GenerativeEnvironment(Environment, Protocol):
    """A world that can also write its own problems and expert demonstrations."""

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """Problems from a seed, the categories in equal numbers as far as possible; deterministic."""
        ...

    def demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        """An error-free expert episode, or None where this problem scripts an error."""
        ...

    def vocabulary(self) -> list[str]:
        """Every entity its messages may hold: the embedded tokenizer makes each one token."""
        ...
