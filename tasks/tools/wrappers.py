"""Base classes of faults and retries: what a wrapper does not override, the inner object answers."""

from __future__ import annotations

from typing import Any

from tasks.core.records import Problem
from tasks.tools.base import Environment, Episode


class EpisodeWrapper:
    def __init__(self, inner: Episode):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class EnvironmentWrapper:
    def __init__(self, inner: Environment):
        self.inner = inner

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return self.inner.start(problem, stream=stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
