"""How fast an engine is, as seen by who waits for it: seconds between replies, and what was written in them.

`plan --gpus` fits the engine's speed to these rows. They hold time, so they are no part of a result. An engine in this
process (`is_beside` False) stands still while the process plays the environments, so only polls count as its seconds;
one in processes of its own goes on meanwhile. Its steps are counted from outside: a turn gets a token per step, so an
ended turn says how far they are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.rollouts.engine import EpisodeHandle

MOST_ROWS = 16_384  # kept: the newest


@dataclass(slots=True)
class EngineTime:
    """Of the engine up to a reply: its `seconds` and `steps`; `live_seconds`, the turns under way summed over the
    seconds; tokens `fed` for the turns `begun`, which began at `reads` moments. `host_seconds` passed between polls for
    `host_turns` replies, while other turns were under way: what the process does for a turn.
    """

    seconds: float = 0.0
    steps: float = 0.0
    live_seconds: float = 0.0
    fed: int = 0
    begun: int = 0
    reads: int = 0
    host_seconds: float = 0.0
    host_turns: int = 0


class EngineClock:
    """Around the polls of an engine; `now` gives seconds. `seconds` are those of all rows that ever were."""

    def __init__(self, *, is_beside: bool, now: Callable[[], float] = time.perf_counter):
        self.is_beside, self.now = is_beside, now
        self.ended: deque[EngineTime] = deque(maxlen=MOST_ROWS)
        self.row, self.seconds = EngineTime(), 0.0
        self.steps = self.last = 0.0  # the engine's, and when it was looked at last
        self.began_at: dict[EpisodeHandle, float] = {}  # the steps before each turn
        self.num_live = self.num_new = 0

    def submit(self, episode: EpisodeHandle, num_fed: int) -> None:
        self.began_at[episode] = self.steps
        self.row.fed += num_fed
        self.row.begun += 1
        self.num_new += 1

    def begin_poll(self, num_live: int) -> None:
        now = self.now()
        if self.num_live:  # else nothing was under way, and what was waited for is not known
            self.row.host_seconds += now - self.last
            if self.is_beside:
                self._advance(now)
        self.row.reads += self.num_new > 0
        self.num_live, self.num_new, self.last = num_live, 0, now

    def end_poll(self, replies: Sequence[tuple[EpisodeHandle, int]]) -> None:
        """`replies` are episodes and the tokens sampled for them."""
        self._advance(self.now())
        self.num_live -= len(replies)
        if self.num_live:
            self.row.host_turns += len(replies)
        if replies:
            ends = [self.began_at.pop(episode, self.steps) + num_sampled for episode, num_sampled in replies]
            self.row.steps = max(0.0, max(ends) - self.steps)
            self.steps += self.row.steps
            self.ended.append(self.row)
            self.row = EngineTime()

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.ended]

    def _advance(self, now: float) -> None:
        self.seconds += now - self.last
        self.row.seconds += now - self.last
        self.row.live_seconds += self.num_live * (now - self.last)
        self.last = now
