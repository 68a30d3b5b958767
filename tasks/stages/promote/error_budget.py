"""How often a year of decisions may be wrong, spent decision by decision.

A decision at 95% confidence passes a challenger no better than its opponent with a chance of up to 2.5%, and of 365
such nights almost surely one. So each decision gets an error of its own, `alpha`, and those of any 365 days add up to
`per_year` at most. By the union bound the chance that even one of them makes a champion wrongly is then no more than
`per_year`, whatever the decisions have in common: the champion's episodes, the test problems, the training data.

*Wrongly* is one of two: as better, a challenger whose true success is no higher than the champion's; as cheaper, one
that truly lost more success than `promote.or_cheaper.max_success_loss`. The two need no share each: one that lost more
than the margin is also no better, and the test for the smaller loss errs the more often of the two.

The bound is on success alone. A saving that is not there is no error it counts: the cheaper way shows the saving at
alpha as well, by a test of its own. So a challenger that is no better and saves no more than `min_saving` passes with a
chance of up to 2·alpha, in a year up to twice `per_year`; of these, the half that passes as cheaper loses less than the
margin, but for what the bound on success allows.

How much a decision gets never depends on what it, or one before it, found. That keeps the bound free of assumptions,
and is why nothing is refunded where another check failed: that check saw the same episodes. A promotion's error is not
handed on either (Tian & Ramdas 2021, online fallback): as a decision never gets more than its even share, it would
serve only decisions beyond `decisions_per_year`.

Source: alpha spending, DeMets & Lan 1994 (doi:10.1002/sim.4780131308); decisions that come one by one, Tian & Ramdas
2021 (doi:10.1177/0962280220983381), with an even share for each instead of a series that ends. Left out: where the
decisions are written down (`tracking/journal.py`), and what a test does with its alpha (`promote/policy.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tasks.stages.promote.settings import ErrorBudgetSettings

WINDOW = timedelta(days=365)
LEAST = 1e-9  # a test at no error at all has no interval; a thousand of these are a millionth


@dataclass(frozen=True, slots=True)
class Spending:
    """The error that one decision was given, and when."""

    at: datetime
    alpha: float


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """What is spent within the 365 days before a decision at the time `at`, and the one-sided error `alpha` that it may
    spend itself.

    `share` is an even share, which a decision gets until half of what is left is less. `renews_at` is when the oldest
    spending leaves the window, None where there is none.
    """

    per_year: float
    at: datetime
    share: float
    spent: float
    num_decisions: int
    alpha: float
    renews_at: datetime | None

    def to_row(self, *, this_decision: float, is_spent_anew: bool) -> dict[str, Any]:
        """Its part of decision.json, after a decision that spent `this_decision`, now or when it was taken before."""
        spent = self.spent + this_decision * is_spent_anew
        renews_at = self.renews_at or (self.at + WINDOW if this_decision * is_spent_anew else None)
        return {
            "per_year": self.per_year,
            "window_days": WINDOW.days,
            "share": self.share,
            "this_decision": this_decision,
            "is_spent_anew": is_spent_anew,
            "spent": round(spent, 9),
            "left": round(max(0.0, self.per_year - spent), 9),
            "num_decisions": self.num_decisions + is_spent_anew,
            "renews_at": renews_at.isoformat(timespec="seconds") if renews_at else None,
        }


def error_budget(
    options: ErrorBudgetSettings, spendings: Iterable[Spending], *, at: datetime, most: float
) -> ErrorBudget:
    """The budget as a decision at the time `at` finds it: alpha = min(share, half of what is left, `most`).

    Half of what is left: so a decision beyond `decisions_per_year` is not refused, and sees less. None gets less than
    `LEAST`, with which nothing passes by luck. A spending dated after `at`, by a clock set back since, counts.
    """
    in_window = [spending for spending in spendings if spending.at > at - WINDOW]
    spent = sum(spending.alpha for spending in in_window)
    share = min(options.per_year / options.decisions_per_year, most)
    return ErrorBudget(
        per_year=options.per_year,
        at=at,
        share=share,
        spent=spent,
        num_decisions=len(in_window),
        alpha=max(LEAST, min(share, (options.per_year - spent) / 2)),
        renews_at=min(spending.at for spending in in_window) + WINDOW if in_window else None,
    )
