"""How small a difference a comparison can detect, printed before a run. The constants below are its assumptions."""

from __future__ import annotations

import math
from typing import Literal

from tasks.measurement.significance import smallest_p_value

# Shares of the variance p(1−p) of one episode's success: between problems (the rest is luck of the draw); of that, the
# share that both policies have in common (1.0: equally hard for both); of what is not common, between split groups.
SHARE_BETWEEN_PROBLEMS = 0.5
SHARED_DIFFICULTY = 0.5
SHARE_BETWEEN_GROUPS = 0.5


def minimum_detectable_difference(
    *,
    num_problems: int,
    samples_per_problem: int,
    confidence: float,
    power: float,
    success_rate: float = 0.5,
    num_groups: int | None = None,
) -> float:
    """The true difference of success that a paired comparison of two policies finds with probability `power`; 1.0 where
    no difference is that large.

    Found means that the paired interval at `confidence` excludes 0. A per-problem difference of means has variance
    2·p(1−p)·(b·(1−c) + (1−b)/k): b is between problems, of which c is shared by both policies and cancels in the pair,
    and k samples average the rest. `success_rate` p = ½ is the worst case, `num_groups` None a group for each problem.
    """
    variance = 2 * success_rate * (1 - success_rate)
    return min(
        1.0,
        _quantiles(0.5 - confidence / 2, power, num_problems, num_groups)
        * _standard_error(variance, num_problems, samples_per_problem, num_groups),
    )


def detectable_change(
    direction: Literal["gain", "loss"],
    *,
    success_rate: float,
    num_problems: int,
    samples_per_problem: int,
    level: float,
    power: float,
    num_groups: int | None = None,
) -> float | None:
    """How much more, or less, than `success_rate` a policy must succeed for a one-sided test at `level` to find it with
    probability `power`; None where no change is found.

    Unlike above, each policy has the variance of its own rate: near 100% a gain is easier to find than near 50%, and
    than a loss.
    """
    from scipy.optimize import brentq

    largest = 1 - success_rate if direction == "gain" else success_rate
    quantiles = _quantiles(level, power, num_problems, num_groups)

    def excess(change: float) -> float:
        other = success_rate + (change if direction == "gain" else -change)
        variance = success_rate * (1 - success_rate) + other * (1 - other)
        return change - quantiles * _standard_error(variance, num_problems, samples_per_problem, num_groups)

    if largest <= 0 or excess(largest) <= 0:
        return None
    return round(float(brentq(excess, 0.0, largest)), 6)


def chance_to_show(margin: float, *, width: float, alpha: float) -> float:
    """Power of the non-inferiority test: the chance that an equally good policy shows a loss below `margin`, one-sided
    at `alpha`. The standard error is that of an interval of this `width` at 1 − 2·alpha.
    """
    from scipy.special import ndtr, ndtri

    z = float(ndtri(1 - alpha))
    standard_error = width / (2 * z)
    return round(float(ndtr(margin / standard_error - z)), 6) if standard_error > 0 else 1.0


def _quantiles(level: float, power: float, num_problems: int, num_groups: int | None) -> float:
    """How many standard errors a difference must be; infinite where so few groups never reach the level."""
    from scipy.special import stdtrit

    if smallest_p_value(num_groups or num_problems) > level:
        return math.inf
    freedom = (num_groups or num_problems) + 1
    return float(stdtrit(freedom, 1 - level) + stdtrit(freedom, power))


def _standard_error(variance: float, num_problems: int, samples_per_problem: int, num_groups: int | None) -> float:
    """`variance` is the sum of both policies' p(1−p)."""
    if min(num_problems, samples_per_problem) < 1:
        raise ValueError(
            f"{num_problems} problems with {samples_per_problem} samples each measure nothing, so no difference could "
            f"be found. Give at least one of both."
        )
    between = SHARE_BETWEEN_PROBLEMS * (1 - SHARED_DIFFICULTY)
    of_groups = SHARE_BETWEEN_GROUPS * between * (num_problems / (num_groups or num_problems))
    of_problems = (1 - SHARE_BETWEEN_GROUPS) * between + (1 - SHARE_BETWEEN_PROBLEMS) / samples_per_problem
    # Two made-up problems join, so that few problems promise no more than their interval can keep.
    total = num_problems + 2
    return math.sqrt((num_problems * variance * (of_groups + of_problems) + 1) / total / total) * total / num_problems
