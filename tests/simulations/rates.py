"""A stated rate, and what a simulation found: whether the two agree as far as so many trials can say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

# A simulation may miss its stated value by so many standard errors: of fifty rates at their very bound one in a
# hundred runs is off by luck (2.3e-4 each).
TOLERANCE = 3.5

Simulate = Callable[[int, int], Sequence[float] | np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Rate:
    """What turnwise states, and how to find out whether it is so.

    `simulate(num_trials, seed)` gives one number per trial: 1.0 or 0.0 for `unit: "%"` of a yes or no, a share for a
    change in `points`. `stated` is the value the mean must be at `most` or at `least`; None where nothing is promised
    and the figure is there to be read, a power for one. `before` is the value of commit 7601ae5: a number where its
    functions were measured, a text where it is what an issue states. `num_trials` is that of the benchmark.
    """

    claim: str
    simulate: Simulate
    num_trials: int
    stated: float | None
    bound: Literal["most", "least"] = "most"
    before: float | str = ""
    unit: Literal["%", "points"] = "%"

    @property
    def name(self) -> str:
        return self.simulate.__name__.removeprefix("simulate_") if hasattr(self.simulate, "__name__") else self.claim

    def stated_text(self) -> str:
        return "" if self.stated is None else f"at {self.bound} {self.number_text(self.stated)}"

    @property
    def digits(self) -> int:
        """After the point of a percentage: enough to see a stated value as small as a nightly decision's error."""
        return 3 if self.stated is not None and 0 < self.stated < 0.005 else 1

    def number_text(self, value: float) -> str:
        return f"{value:.{self.digits}%}" if self.unit == "%" else f"{100 * value:+.1f} points"


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean over the trials, with its standard error."""

    rate: Rate
    mean: float
    standard_error: float
    num_trials: int

    @property
    def holds(self) -> bool:
        """Whether the mean is on its side of the stated value, but for the error of so many trials."""
        if self.rate.stated is None:
            return True
        excess = self.mean - self.rate.stated if self.rate.bound == "most" else self.rate.stated - self.mean
        return excess <= TOLERANCE * self.standard_error

    def to_row(self) -> dict[str, Any]:
        return {
            "claim": self.rate.claim,
            "stated": self.rate.stated_text(),
            "before": self.rate.before
            if isinstance(self.rate.before, str)
            else self.rate.number_text(self.rate.before),
            "now": self.text(),
            "mean": round(self.mean, 6),
            "standard_error": round(self.standard_error, 6),
            "num_trials": self.num_trials,
            "holds": self.holds,
        }

    def text(self) -> str:
        digits = self.rate.digits if self.standard_error >= 0.0005 else 3
        return f"{self.rate.number_text(self.mean)} ± {100 * self.standard_error:.{digits}f}"


def measure(rate: Rate, *, share: float = 1.0, seed: int = 1) -> Measured:
    """Run so large a share of its trials. A yes-or-no rate has the error of its stated value, where it has one."""
    values = np.asarray(rate.simulate(max(1, math.ceil(rate.num_trials * share)), seed), dtype=float)
    is_yes_or_no = rate.unit == "%" and bool(np.isin(values, (0.0, 1.0)).all())
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.inf
    if is_yes_or_no:
        expected = mean if rate.stated is None else rate.stated
        spread = math.sqrt(max(expected * (1 - expected), mean * (1 - mean)))
    return Measured(rate, mean, spread / math.sqrt(len(values)), len(values))


def all_rates() -> list[Rate]:
    """The RATES of every module of this folder, in the order of their names."""
    modules = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in ("__init__", "rates"))
    return [rate for module in modules for rate in getattr(import_module(f"tests.simulations.{module}"), "RATES", ())]
