"""What each turn of a collection was: the tokens fed and sampled, the tool's seconds.

`plan --gpus` draws its episodes from it. It is kept apart from trajectories, which hold no time: the same seed gives
the same trajectories. How fast the engine was is in `engine_clock.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.rollouts.conversation import Conversation

MOST_EPISODES = 4096  # kept: the newest


@dataclass(slots=True)
class TurnTime:
    """`fed` are the tokens that the engine had not seen before the turn, `sampled` those it wrote; `tool_seconds` were
    waited for after it.
    """

    fed: int
    sampled: int = 0
    tool_seconds: float = 0.0


class RolloutClock:
    """The collector calls it; `now` gives seconds. Episodes that a fault ended are not kept."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.ended: deque[dict[str, Any]] = deque(maxlen=MOST_EPISODES)
        self.forget()

    def forget(self) -> None:
        """A collection begins; what an earlier one left open is no episode."""
        self.turns: dict[Conversation, list[TurnTime]] = {}
        self.seen: dict[Conversation, list[int]] = {}  # tokens the engine had, of each sequence of each episode
        self.waits: dict[Conversation, float] = {}

    def begin_turn(self, run: Conversation) -> None:
        lengths = [len(sequence.token_ids) for sequence in run.sequences]
        self.turns.setdefault(run, []).append(TurnTime(fed=sum(lengths) - sum(self.seen.get(run, ()))))
        self.seen[run] = lengths

    def end_turn(self, run: Conversation) -> None:
        seen = self.seen[run]
        masks = zip(run.sequences, seen, strict=False)  # one that began since then has nothing sampled yet
        sampled = [sum(sequence.sampled_mask[before:]) for sequence, before in masks]
        self.turns[run][-1].sampled = sum(sampled)
        self.seen[run] = [before + count for before, count in zip(seen, sampled, strict=True)]

    def begin_wait(self, run: Conversation) -> None:
        self.waits[run] = self.now()

    def end_wait(self, run: Conversation) -> None:
        """What is waited for before the first turn is the user's opening, and is left out."""
        since = self.waits.pop(run)
        if turns := self.turns.get(run):
            turns[-1].tool_seconds += self.now() - since

    def end_episode(self, run: Conversation) -> None:
        turns = self.turns.pop(run, [])
        self.seen.pop(run, None)
        if run.fault is None and turns:
            times = [{name: getattr(turn, name) for name in TurnTime.__slots__} for turn in turns]  # asdict copies deep
            self.ended.append({"problem_id": run.key.problem.id, "draw": run.key.draw, "turns": times})

    def rows(self) -> list[dict[str, Any]]:
        """One per episode, in the order in which they ended."""
        return [*self.ended]
