"""Did the champion fall? Its fresh success, on other problems of `select` each time, against what it was promoted with.

It fell where the interval of the difference lies below zero. Both successes are measured on split groups of their own,
so that interval is made of their two (MOVER, Zou & Donner 2008, doi:10.1002/sim.3095): a fresh interval that lies below
the other one altogether always counts, one that overlaps it a little may. A check's error is an even share of a year's
(decision 0031's alpha spending): a champion as good as it was is called fallen with at most that chance, so the chances
of a year add up to `per_year`. `test` is never played: daily looks would wear out what confirms a promotion.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from pydantic import Field

from tasks.core.settings import Settings
from tasks.stages.promote.error_budget import Spending, error_budget
from tasks.stages.promote.settings import ErrorBudgetSettings

Item = TypeVar("Item")
Interval = Mapping[str, Any]  # "success_rate", "ci_low", "ci_high"


class DriftCheckSettings(Settings):
    """Problems of `select` that a check plays with the champion, episodes of each, and the chance that within any 365
    days even one check calls a champion fallen that is as good as it was; each of so many checks gets an even share.
    """

    num_problems: int = Field(ge=1)
    samples_per_problem: int = Field(ge=1)
    error_budget: ErrorBudgetSettings


def check_error(settings: DriftCheckSettings, past: Iterable[Mapping[str, Any]], *, at: datetime) -> float:
    """The one-sided error of the check at the time `at`; `past` are the rows of earlier ones (`at`, `alpha`)."""
    spendings = [Spending(datetime.fromisoformat(row["at"]), float(row["alpha"])) for row in past]
    return error_budget(settings.error_budget, spendings, at=at, most=0.5).alpha


def confidence_of(alpha: float) -> float:
    """Of both intervals, each of whose ends is wrong with a chance of `alpha`."""
    return 1 - 2 * alpha


def most_change(fresh: Interval, promoted: Interval) -> float:
    """The upper end of the change in success since the promotion, at the confidence of both intervals."""
    change = fresh["success_rate"] - promoted["success_rate"]
    return float(
        change + math.hypot(fresh["ci_high"] - fresh["success_rate"], promoted["success_rate"] - promoted["ci_low"])
    )


def has_fallen(fresh: Interval, promoted: Interval) -> bool:
    return most_change(fresh, promoted) < 0


def choose_problems(problems: Sequence[Item], settings: DriftCheckSettings, *, seed: int, number: int) -> list[Item]:
    """The problems of check `number`, in the order of `select`: others each time, so that no few problems decide."""
    size = min(settings.num_problems, len(problems))
    places = random.Random(f"{seed}.champion_check.{number}").sample(range(len(problems)), size)
    return [problems[place] for place in sorted(places)]
