"""A stated rate, and what a simulation found: whether the two agree as far as so many trials can say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import binom

# The chance that a rate which is exactly its bound is refused: 2.6 standard errors of the bound, one-sided, and exact
# where a bound is as small as a nightly decision's error. Most rates are well within theirs.
REFUSED_BY_LUCK = 0.005

Simulate = Callable[[int, int], Sequence[float] | np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Rate:
    """What turnwise states, and how to find out whether it is so.

    `simulate(num_trials, seed)` gives 1.0 or 0.0 per trial. `stated` is the value the mean must be at `most` or at
    `least`; None where nothing is promised and the figure is there to be read, a power for one. `before` is the value
    of commit 7601ae5: a number where its functions were measured, a text where it is what an issue states.
    `num_trials` is that of the benchmark. `regression_bound` is near what the rate is today, on the same side as
    `stated`: who changes it on purpose sets it anew.
    """

    claim: str
    simulate: Simulate
    num_trials: int
    stated: float | None
    bound: Literal["most", "least"] = "most"
    before: float | str = ""
    regression_bound: float | None = None

    def __post_init__(self) -> None:
        assert self.stated is not None or self.regression_bound is not None, f"{self.claim}: no value could fail"

    @property
    def name(self) -> str:
        return self.simulate.__name__.removeprefix("simulate_") if hasattr(self.simulate, "__name__") else self.claim

    @property
    def strictest(self) -> float:
        """Of the stated value and the bound of today, the one that is harder to keep."""
        bounds = [value for value in (self.stated, self.regression_bound) if value is not None]
        return min(bounds) if self.bound == "most" else max(bounds)

    def limit(self, num_trials: int) -> int:
        """The most hits (or fewest) that are no surprise of so many trials where the rate is its strictest bound."""
        chance = 1 - REFUSED_BY_LUCK if self.bound == "most" else REFUSED_BY_LUCK
        return int(binom.ppf(chance, num_trials, self.strictest))

    def chance_to_hold(self, true_rate: float, num_trials: int) -> float:
        """How likely a simulation of so many trials accepts what is truly `true_rate`."""
        limit = self.limit(num_trials)
        most, least = binom.cdf(limit, num_trials, true_rate), binom.sf(limit - 1, num_trials, true_rate)
        return float(most if self.bound == "most" else least)

    def stated_text(self) -> str:
        return "" if self.stated is None else f"at {self.bound} {self.number_text(self.stated)}"

    def limit_text(self, num_trials: int) -> str:
        return f"at {self.bound} {self.number_text(self.limit(num_trials) / num_trials)}"

    @property
    def digits(self) -> int:
        """After the point of a percentage: enough to see a stated value as small as a nightly decision's error."""
        return 3 if self.stated is not None and 0 < self.stated < 0.005 else 1

    def number_text(self, value: float) -> str:
        return f"{value:.{self.digits}%}"


@dataclass(frozen=True, slots=True)
class Measured:
    """How many of the trials were hits, and the seconds of CPU they took."""

    rate: Rate
    num_hits: int
    num_trials: int
    cpu_seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.num_hits / self.num_trials

    @property
    def standard_error(self) -> float:
        """That of the stated value, or of the mean where nothing is stated."""
        expected = self.mean if self.rate.stated is None else self.rate.stated
        return math.sqrt(expected * (1 - expected) / self.num_trials)

    @property
    def holds(self) -> bool:
        """Whether the hits are on their side of the limit; the mean that was found says nothing about its own error."""
        limit = self.rate.limit(self.num_trials)
        return self.num_hits <= limit if self.rate.bound == "most" else self.num_hits >= limit

    def to_row(self) -> dict[str, Any]:
        before = self.rate.before
        return {
            "claim": self.rate.claim,
            "stated": self.rate.stated_text(),
            "before": before if isinstance(before, str) else self.rate.number_text(before),
            "now": self.text(),
            "limit": self.rate.limit_text(self.num_trials),
            "mean": round(self.mean, 6),
            "standard_error": round(self.standard_error, 6),
            "num_trials": self.num_trials,
            "holds": self.holds,
            "cpu_seconds": round(self.cpu_seconds, 1),
        }

    def text(self) -> str:
        digits = self.rate.digits if self.standard_error >= 0.0005 else 3
        return f"{self.rate.number_text(self.mean)} ± {100 * self.standard_error:.{digits}f}"


def measure(rate: Rate, *, share: float = 1.0, seed: int = 1) -> Measured:
    """Run so large a share of its trials."""
    started = time.process_time()
    values = np.asarray(rate.simulate(num_trials_of(rate, share), seed), dtype=float)
    assert np.isin(values, (0.0, 1.0)).all(), f"{rate.claim}: a trial is a yes or a no"
    return Measured(rate, int(values.sum()), len(values), time.process_time() - started)


def num_trials_of(rate: Rate, share: float) -> int:
    return max(1, math.ceil(rate.num_trials * share))


def all_rates() -> list[Rate]:
    """The RATES of every module of this folder, in the order of their names."""
    modules = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in ("__init__", "rates"))
    return [rate for module in modules for rate in getattr(import_module(f"tests.simulations.{module}"), "RATES", ())]
