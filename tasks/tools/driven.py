"""Episodes that drive themselves: an agent asks an endpoint for turns, calls tools there, and ends when it wants to.

An environment whose `is_driven_by_agent` is true starts a DrivenEpisode for each problem. Rollouts tell it where the
policy is reached, wait for what it asks, and take its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.core.records import Record, Turn
from tasks.tools.base import Episode


class AgentTask(Record):
    """What an agent is told of a problem. Its solution is no part of it, nor is the state of the world whose tools it
    gets: an agent may read all that it is told to the policy. `rules`: what a model reads first in turnwise's own loop.
    `world`: the problem's own, where the agent brings its tools; else empty.
    """

    id: str
    category: str
    requests: list[str]
    rules: str
    world: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one episode's agent reaches the policy, and its tools by MCP. `key` tells the episode; `model` is the name
    to ask for.
    """

    openai_url: str
    anthropic_url: str
    mcp_url: str
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """An agent ended by itself. `answer`: its final message, None where it told none and its last turn is it."""

    answer: str | None = None


class AgentClock:
    """What is left of an agent's time. It stands still while the agent waits for the endpoint, in any thread."""

    def __init__(self, seconds: float):
        self._left, self._since = seconds, time.monotonic()
        self._num_held = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._left, self._num_held = self._now_left(), self._num_held + 1

    def go(self) -> None:
        with self._lock:
            self._since, self._num_held = time.monotonic(), self._num_held - 1

    @property
    def left(self) -> float:
        with self._lock:
            return self._now_left()

    def _now_left(self) -> float:
        return self._left - (0 if self._num_held else time.monotonic() - self._since)


class DrivenEpisode(Episode, Protocol):
    """`clock` is held while its agent waits for a turn, or for a tool of the endpoint. `call` is for tools that the
    endpoint serves. `models`: the names that its agent may ask for.
    """

    clock: AgentClock
    models: Sequence[str]

    def launch(self, endpoint: Endpoint) -> Future[AgentEnd]:
        """Start the agent. EnvironmentFault in the Future if it crashed, or its time ran out."""
        ...

    def read_turns(self, turns: Sequence[Turn]) -> None:
        """All that were recorded, before the verdict is asked for."""
        ...
