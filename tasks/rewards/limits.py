"""What ends an episode, as far as the bounds of a reward's parts depend on it, and such bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The most turns, calls and sampled tokens of one episode. Calls beyond a message's limit are answered by one
    error, which counts as a call.
    """

    max_turns: int
    max_calls: int
    max_sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most of a failed episode and of a successful one."""

    failure_least: float
    failure_most: float
    success_least: float
    success_most: float


UNIT = Bounds(0.0, 1.0, 0.0, 1.0)
