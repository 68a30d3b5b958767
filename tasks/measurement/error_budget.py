"""How often a year of decisions may be wrong, spent decision by decision.

A decision at 95% confidence passes a challenger no better than its rival with a chance of up to 2.5%, and of 365 such
nights almost surely one. So each decision gets an error of its own, `alpha`, and those of any 365 days add up to
`per_year` at most. By the union bound the chance that even one of them makes a champion wrongly is then no more than
`per_year`, whatever the decisions have in common: the champion's episodes, the test problems, the training data.

*Wrongly* is one of two: as better, a challenger whose true success is no higher than the champion's; as cheaper, one
that truly lost more success than `promote.or_cheaper.max_success_loss`. The two need no share each: one that lost more
than the margin is also no better, and the test for the smaller loss errs the more often of the two.

How much a decision gets never depends on what it, or one before it, found. That keeps the bound free of assumptions,
and is why nothing is refunded where another check failed: that check saw the same episodes. A promotion's error is not
handed on either (Tian & Ramdas 2021, online fallback): as a decision never gets more than its even share, it would
serve only decisions beyond `decisions_per_year`.

Source: alpha spending, DeMets & Lan 1994 (doi:10.1002/sim.4780131308); decisions that come one by one, Tian & Ramdas
2021 (doi:10.1177/0962280220983381), with an even share for each instead of a series that ends. Left out: where the
decisions are written down (`tracking/journal.py`), and what a test does with its alpha (`promotion_policy.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field

from tasks.settings import Settings

WINDOW = timedelta(days=365)


class ErrorBudgetOptions(Settings):
    """The chance of making even one champion wrongly within any 365 days, and for how many decisions it has to do."""

    per_year: float = Field(gt=0, lt=1)
    decisions_per_year: int = Field(ge=1)


@dataclass(frozen=True, slots=True)
class Spending:
    """The error that one decision was given, and when."""

    at: datetime
    alpha: float


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """What is spent within the 365 days before a decision, and the one-sided error `alpha` that it may spend itself.

    `share` is an even share, which a decision gets until half of what is left is less. `renews_at` is when the oldest
    spending leaves the window, None where there is none.
    """

    per_year: float
    share: float
    spent: float
    num_decisions: int
    alpha: float
    renews_at: datetime | None

    @property
    def is_short(self) -> bool:
        """Whether there were more decisions than `decisions_per_year`, so that this one gets less than its share."""
        return self.alpha < self.share

    def to_row(self, *, alpha: float, is_new: bool) -> dict[str, Any]:
        """Its part of decision.json, after a decision at `alpha`. One that is not new spends nothing again."""
        spent = self.spent + (alpha if is_new else 0.0)
        return {
            "per_year": self.per_year,
            "window_days": WINDOW.days,
            "this_decision": alpha,
            "is_spent_anew": is_new,
            "share": self.share,
            "spent": _rounded(spent),
            "left": _rounded(self.per_year - spent),
            "num_decisions": self.num_decisions + is_new,
            "renews_at": self.renews_at.isoformat() if self.renews_at else None,
        }


def error_budget(
    options: ErrorBudgetOptions, spendings: Iterable[Spending], *, at: datetime, most: float
) -> ErrorBudget:
    """The budget as a decision at the time `at` finds it: alpha = min(share, half of what is left, `most`).

    Half of what is left: so a decision beyond `decisions_per_year` is never refused, and sees less. A spending dated
    after `at`, by a clock that was set back since, counts.
    """
    in_window = [spending for spending in spendings if spending.at > at - WINDOW]
    spent = sum(spending.alpha for spending in in_window)
    share = min(options.per_year / options.decisions_per_year, most)
    # An option made stricter leaves more spent than there is: then the power is gone until the window moves on.
    left = max(0.0, options.per_year - spent)
    return ErrorBudget(
        per_year=options.per_year,
        share=share,
        spent=spent,
        num_decisions=len(in_window),
        alpha=min(share, left / 2),
        renews_at=min(spending.at for spending in in_window) + WINDOW if in_window else None,
    )


def _rounded(alpha: float) -> float:
    return round(alpha, 12)  # sums of floats: 0.1 − 365 shares is 0
