"""What cache, faults and retries have in common: an environment around an environment, an episode around an episode.

Everything that is not overridden goes through, the optional parts of a world (`generate`, `demonstrate`) included.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from tasks.core.records import Problem
from tasks.tools.base import Answer, Environment, Episode, ToolReply, Verdict


class EpisodeWrapper:
    """An episode that passes everything on."""

    def __init__(self, inner: Episode):
        self.inner = inner

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return self.inner.call(name, arguments)

    def malformed_call(self) -> ToolReply:
        return self.inner.malformed_call()

    def end_turn(self, message: str | None) -> None:
        self.inner.end_turn(message)

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        return self.inner.verdict(final_message)

    def close(self) -> None:
        self.inner.close()


class EnvironmentWrapper:
    """An environment that passes everything on."""

    def __init__(self, inner: Environment):
        self.inner = inner

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return self.inner.start(problem, stream=stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
