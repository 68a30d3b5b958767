"""What each turn of a collection took: the engine's seconds, how many turns it wrote beside it, the tool's seconds.

`plan --gpus` simulates other numbers of engines from it. It is kept apart from trajectories, which hold no time: the
same seed gives the same trajectories.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tasks.rollouts.conversation import Conversation

MOST_EPISODES = 4096  # kept: the newest


@dataclass(slots=True)
class TurnTime:
    """`fed` are the tokens that the engine had not seen before the turn, `sampled` those it wrote.

    `live_seconds`: the turns that were written at a time, summed over the engine's seconds of this one;
    `fed_meanwhile`: tokens fed for all turns in that time, its own among them. `tool_seconds`: what was waited for
    after it.
    """

    fed: int
    sampled: int = 0
    engine_seconds: float = 0.0
    live_seconds: float = 0.0
    fed_meanwhile: int = 0
    tool_seconds: float = 0.0


@dataclass(slots=True)
class _Open:
    turn: TurnTime
    since: float
    live_before: float
    fed_before: int
    num_tokens: int


class RolloutClock:
    """The collector calls it; `now` gives seconds. Episodes that a fault ended are not kept."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.ended: deque[dict[str, Any]] = deque(maxlen=MOST_EPISODES)
        self.forget()

    def forget(self) -> None:
        """A collection begins; what an earlier one left open is no episode."""
        self.turns: dict[Conversation, list[TurnTime]] = {}
        self.open: dict[Conversation, _Open] = {}
        self.seen: dict[Conversation, int] = {}  # tokens the engine had, of each episode
        self.waits: dict[Conversation, float] = {}
        self.live_seconds, self.num_fed, self.last = 0.0, 0, self.now()

    def begin_turn(self, run: Conversation) -> None:
        self._advance()
        num_tokens = len(run.token_ids)
        turn = TurnTime(fed=num_tokens - self.seen.get(run, 0))
        self.open[run] = _Open(turn, self.last, self.live_seconds, self.num_fed, num_tokens)
        self.num_fed += turn.fed

    def end_turn(self, run: Conversation) -> None:
        self._advance()
        one = self.open.pop(run)
        turn = one.turn
        turn.sampled = sum(run.sampled_mask[one.num_tokens :])
        turn.engine_seconds = self.last - one.since
        turn.live_seconds = self.live_seconds - one.live_before
        turn.fed_meanwhile = self.num_fed - one.fed_before
        self.seen[run] = one.num_tokens + turn.sampled
        self.turns.setdefault(run, []).append(turn)

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
            times = [asdict(turn) for turn in turns]
            self.ended.append({"problem_id": run.key.problem.id, "draw": run.key.draw, "turns": times})

    def rows(self) -> list[dict[str, Any]]:
        """One per episode, in the order in which they ended."""
        return [*self.ended]

    def _advance(self) -> None:
        now = self.now()
        self.live_seconds += len(self.open) * (now - self.last)
        self.last = now
