"""Intervals of success rates, and of their differences, where problems of one split group are alike.

Numbers in, numbers out: per-problem means of success, or per-problem differences of them, and the group of each.
`statistics.py` makes those from trajectories. Both intervals are the score interval that independent samples would
give (Wilson's of a rate, Tango's of a paired difference), taken on the *effective number* of samples: as many
independent ones as would be as sure as these are, by how the groups differ. So they are sane at 0% and 100% and where
hardly anything differs, and are exactly Wilson's and Tango's where every group is one problem with one sample. Why
these, and what they cover: infra/decisions/0029-split-groups-are-the-unit.md.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusteredMean:
    """Mean over problems of a number each, with what its groups show of its error.

    `variance` is that of the mean, clustered by group (CR1), None where one group alone shows none; `freedom` are the
    degrees of freedom it is known with; `num_groups` are as many groups of equal size as would weigh as much as these.
    """

    mean: float
    mean_square: float
    mean_size: float
    num_problems: int
    num_groups: float
    variance: float | None
    freedom: float


def clustered_mean(values: Sequence[float], groups: Sequence[Hashable] | None = None) -> ClusteredMean:
    """`groups` has one entry per value; None is a group for each.

    Source of the variance: Cameron, Gelbach and Miller 2008 (doi:10.1162/rest.90.3.414). Its degrees of freedom are
    Satterthwaite's, 2·E²/Var, from the fourth moment: where few groups hold all the spread, they are few.
    """
    import numpy as np

    if not len(values):
        raise ValueError("no problem was measured, so there is no interval. Give at least one problem.")
    numbers = np.asarray(values, dtype=np.float64)
    places: dict[Hashable, int] = {}
    labels = [places.setdefault(group, len(places)) for group in (range(len(numbers)) if groups is None else groups)]
    sums, sizes = np.bincount(labels, numbers), np.bincount(labels, np.ones(len(labels)))
    mean, num_groups = float(numbers.mean()), len(sums)
    squares = (sums - sizes * mean) ** 2
    total = float(squares.sum())
    spread = float((squares**2).sum()) - total**2 / num_groups
    is_known = num_groups > 1 and total > 1e-12 * len(numbers)
    return ClusteredMean(
        mean=mean,
        mean_square=float((numbers**2).mean()),
        mean_size=float(np.abs(numbers).mean()),
        num_problems=len(numbers),
        num_groups=float(sizes.sum() ** 2 / (sizes**2).sum()),
        variance=total * num_groups / (num_groups - 1) / len(numbers) ** 2 if is_known else None,
        freedom=min(num_groups - 1.0, 2 * total**2 / spread) if is_known and spread > 0 else max(1.0, num_groups - 1.0),
    )


def clustered_interval(
    success_by_problem: Sequence[float],
    groups: Sequence[Hashable] | None = None,
    *,
    confidence: float,
    num_episodes: int | None = None,
) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem success rates: Wilson's, on the effective number of samples.

    With one sample per problem and one problem per group this is exactly Wilson's score interval, so 0 of 500 gives
    (0, 0.0076) and not (0, 0). `num_episodes`, where known, bounds the effective number: k samples of a problem are at
    best k facts.
    Source: Wilson on n_eff is what Franco et al. 2019 (doi:10.1093/jssam/smy019) recommend for clustered proportions.
    """
    from scipy.special import ndtri

    check_confidence(confidence)
    found = clustered_mean(success_by_problem, groups)
    p, z = found.mean, float(ndtri(0.5 + confidence / 2))
    n = _effective_number(found, p * (1 - p), confidence, most=num_episodes or math.inf)
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def paired_interval(
    differences: Sequence[float], groups: Sequence[Hashable] | None = None, *, confidence: float
) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem differences, each in −1..1: Tango's, on the effective number.

    It holds every difference that `score_z` does not reject.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    check_confidence(confidence)
    found = clustered_mean(differences, groups)
    z = float(ndtri(0.5 + confidence / 2))
    n = _effective_number(found, found.mean_square - found.mean**2, confidence, most=found.num_problems)

    def beyond(difference: float) -> float:
        return abs(score_z(found, difference)) * math.sqrt(n) - z

    most = _step(found)
    low = -most if found.mean <= -most or beyond(-most) <= 0 else brentq(beyond, -most, found.mean)
    high = most if found.mean >= most or beyond(most) <= 0 else brentq(beyond, found.mean, most)
    return float(low), float(high)


def difference_p_value(
    differences: Sequence[float], groups: Sequence[Hashable] | None = None, *, above: float
) -> float:
    """One-sided p-value that the true mean is above `above`: the score test that `paired_interval` inverts.

    Small where it is shown to be. `above` = −margin is the test of non-inferiority.
    """
    from scipy.special import ndtr, stdtr

    found = clustered_mean(differences, groups)
    z = score_z(found, above)
    by_group = z * math.sqrt(found.num_groups)
    by_problem = z * math.sqrt(found.num_problems)
    if found.variance is None:
        return float(ndtr(-by_group))
    n = (found.mean_square - found.mean**2) / found.variance
    by_spread = float(stdtr(found.freedom, -z * math.sqrt(n)))
    least, most = sorted((float(ndtr(-by_group)), float(ndtr(-by_problem))))
    return min(max(by_spread, least), most)


def score_z(found: ClusteredMean, difference: float) -> float:
    """How many standard errors of one pair the mean is above `difference`, were that the true one.

    Of pairs that gain, lose or tie by a step, 1 and −1 and 0 where each was sampled once. The share that loses is
    estimated under the constraint that gains exceed it by `difference`.
    Source: Tango 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B), equations 7 and 8.
    """
    step = _step(found)
    mean, true = found.mean / step, difference / step
    discordant = found.mean_square / step**2
    if mean == true:
        return 0.0
    if abs(true) >= 1:
        return math.copysign(math.inf, mean - true)
    gained, lost = (discordant + mean) / 2, (discordant - mean) / 2
    b = -gained - lost + (2 - gained + lost) * true
    c = -lost * true * (1 - true)
    losing = (math.sqrt(max(0.0, b * b - 8 * c)) - b) / 4
    variance = 2 * losing + true * (1 - true)
    return math.copysign(math.inf, mean - true) if variance <= 0 else (mean - true) / math.sqrt(variance)


def _step(found: ClusteredMean) -> float:
    """The size of one difference: 1 where each problem was sampled once; a made-up one of 1 joins those found."""
    made_up = 1 / found.num_problems
    return (found.mean_square + made_up) / (found.mean_size + made_up)


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence} is not between 0 and 1, so no interval has it. Use 0.95, say.")


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _effective_number(found: ClusteredMean, variance_of_one: float, confidence: float, *, most: float) -> float:
    """How many independent samples would be as sure: the variance of one over that of the mean, from groups to `most`.

    The groups are a true floor: the mean is least sure when problems of a group are all alike. Where no group differs
    nothing shows how alike its problems are, so the floor is taken. (z/t)² pays for the variance being an estimate.
    Source: Korn and Graubard 1998, Survey Methodology 24.
    """
    from scipy.special import ndtri, stdtrit

    if found.variance is None:
        return found.num_groups
    few_groups = float(ndtri(0.5 + confidence / 2) / stdtrit(found.freedom, 0.5 + confidence / 2)) ** 2
    return max(found.num_groups, min(variance_of_one / found.variance * few_groups, most))
