"""How often a year of decisions may be wrong, spent decision by decision; and its sentences.

At 95% confidence a challenger no better than its opponent passes with a chance of up to 2.5%, and of 365 such nights
almost surely one. So each decision gets its own error, `alpha`, and those of any 365 days add up to at most `per_year`:
by the union bound the chance that even one makes a champion wrongly.

*Wrongly*: as better, a challenger whose true success is no higher than the champion's; as cheaper, one that truly lost
more than `max_success_loss`. The second implies the first, so they share one error. The saving has its own test at
alpha: a challenger that is no better and saves no more than `min_saving` passes with up to 2·alpha.

Alpha never depends on what any decision found, which keeps the bound free of assumptions. So nothing is refunded where
another check failed, since it saw the same episodes, and no promotion's error is handed on: that would serve only
decisions beyond `decisions_per_year`.

Source: alpha spending, DeMets & Lan 1994 (doi:10.1002/sim.4780131308); online decisions and fallback, Tian & Ramdas
2021 (doi:10.1177/0962280220983381), with an even share for each instead of a series that ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tasks.stages.promote.settings import ErrorBudgetSettings

WINDOW = timedelta(days=365)
LEAST = 1e-9  # a test at error 0 has no interval; a thousand of these are a millionth


@dataclass(frozen=True, slots=True)
class Spending:
    at: datetime
    alpha: float


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """What is spent within the 365 days before `at`, and the one-sided error `alpha` that a decision may spend: the
    even `share`, or half of what is left if that is less. `renews_at` is when the oldest spending leaves the window.
    """

    per_year: float
    at: datetime
    share: float
    spent: float
    num_decisions: int
    alpha: float
    renews_at: datetime | None

    def to_row(self, *, this_decision: float, is_spent_anew: bool) -> dict[str, Any]:
        """Its part of decision.json, after a decision that spent `this_decision`, now or when it was first taken."""
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
    settings: ErrorBudgetSettings, spendings: Iterable[Spending], *, at: datetime, most: float
) -> ErrorBudget:
    """The budget of a decision at the time `at`: alpha = min(share, half of what is left, `most`), at least `LEAST`.

    Half of what is left: a decision beyond `decisions_per_year` is not refused, it just finds less. At `LEAST` nothing
    passes by luck. A spending dated after `at`, by a clock set back since, counts.
    """
    in_window = [spending for spending in spendings if spending.at > at - WINDOW]
    spent = sum(spending.alpha for spending in in_window)
    share = min(settings.per_year / settings.decisions_per_year, most)
    return ErrorBudget(
        per_year=settings.per_year,
        at=at,
        share=share,
        spent=spent,
        num_decisions=len(in_window),
        alpha=max(LEAST, min(share, (settings.per_year - spent) / 2)),
        renews_at=min(spending.at for spending in in_window) + WINDOW if in_window else None,
    )


def budget_text(budget: Mapping[str, Any]) -> str:
    spent, left = percent_text(budget["spent"]), percent_text(budget["left"])
    this = {
        "first": "The first champion spends no error",
        "forced": "A forced promotion spends no error",
        "against the champion": f"This decision may be wrong with a chance of {percent_text(budget['this_decision'])}",
    }[budget["kind"]]
    renews = f"; the oldest is given back on {budget['renews_at'][:10]}" if budget["renews_at"] else ""
    return (
        f"{this}. Of {percent_text(budget['per_year'])} within {budget['window_days']} days {spent} are spent, {left} "
        f"are left{renews}."
    )


def budget_warning(budget: Mapping[str, Any]) -> str | None:
    if not 0 < budget["this_decision"] < budget["share"] or budget["renews_at"] is None:  # nothing else is spent
        return None
    return (
        f"{budget['num_decisions']} decisions within {budget['window_days']} days leave this one an error of "
        f"{percent_text(budget['this_decision'])} instead of {percent_text(budget['share'])}, so it finds only "
        f"larger differences; the oldest is given back on {budget['renews_at'][:10]}. Decide less often, or raise "
        f"promote.error_budget.decisions_per_year ({budget['planned']})."
    )


def percent_text(share: float) -> str:
    """With two significant digits: 0.000274 is 0.027%, 0.9973 is 100%."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def looks_text(test_set: Mapping[str, Any]) -> str:
    again = "" if test_set["is_new_decision"] else " (this decision was taken before and counts once)"
    return (
        f"Test set {test_set['hash'][:12]}: its problems were looked at {times(test_set['median_looks'])}{again}; "
        f"promote.max_looks_per_problem is {test_set['max_looks']}."
    )


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
