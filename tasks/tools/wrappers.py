"""What faults and retries share: an environment around an environment, an episode around an episode.

What a wrapper does not override, the inner one answers.
"""

from __future__ import annotations

from typing import Any

from tasks.core.records import Problem
from tasks.tools.base import Environment, Episode


class EpisodeWrapper:
    """An episode that passes everything on."""

    def __init__(self, inner: Episode):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class EnvironmentWrapper:
    """An environment that passes everything on."""

    def __init__(self, inner: Environment):
        self.inner = inner

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return self.inner.start(problem, stream=stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
