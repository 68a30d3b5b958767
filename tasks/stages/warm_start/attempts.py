"""Which attempt a warm start makes next: pure rules over the attempts that have ended (infra/decisions/0058)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.learning.shared.settings import SupervisedSettings

End = Literal["num_steps", "held_out_loss", "not_finite"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt `number`, from 0. It starts with the weights of the attempt `start`, or anew from the base model."""

    number: int
    start: int | None
    learning_rate: float


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """What an attempt came to. `success` is the share of the check's problems; None where its weights are no use or
    nothing was played. `held_out_loss` is the lowest, in nats per token.
    """

    number: int
    start: int | None
    learning_rate: float
    num_steps: int
    end: End
    success: float | None
    held_out_loss: float | None


def next_attempt(ended: Sequence[EndedAttempt], settings: SupervisedSettings) -> Attempt | None:
    """None where the warm start is over: good enough, or at the bound.

    An attempt that was better than all before it goes on from where it ended, with its schedule from the start. After
    any other one the next begins anew: other batches, and the learning rate times `rate_factor`.
    """
    if not ended:
        return Attempt(0, None, settings.learning_rate)
    stop, last = settings.stop, ended[-1]
    if stop is None or len(ended) == stop.max_attempts or is_good_enough(best_attempt(ended), settings):
        return None
    if best_attempt(ended) is last:
        return Attempt(len(ended), last.number, last.learning_rate)
    return Attempt(len(ended), None, last.learning_rate * stop.rate_factor)


def best_attempt(ended: Sequence[EndedAttempt]) -> EndedAttempt | None:
    """The first of those with the highest success; None where no attempt has one."""
    usable = [attempt for attempt in ended if attempt.success is not None]
    return max(usable, key=lambda attempt: attempt.success or 0.0, default=None)


def is_good_enough(best: EndedAttempt | None, settings: SupervisedSettings) -> bool:
    if settings.stop is None or best is None or best.success is None:
        return False
    return best.success >= settings.stop.minimum_success


class Patience:
    """The lowest held-out loss so far, and how many checks since brought nothing lower."""

    def __init__(self, patience: int):
        self.patience = patience
        self.lowest: float | None = None
        self.num_since = 0

    def observe(self, loss: float) -> bool:
        """Whether this is the lowest loss."""
        is_lowest = self.lowest is None or loss < self.lowest
        self.lowest, self.num_since = (loss, 0) if is_lowest else (self.lowest, self.num_since + 1)
        return is_lowest

    @property
    def is_over(self) -> bool:
        return self.num_since >= self.patience
