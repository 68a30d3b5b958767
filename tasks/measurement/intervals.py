"""Confidence intervals of success rates and of their differences, clustered by split group.

They invert score tests, Wilson's of a rate and Tango's of a paired difference, with the *group* as the sample. Variance
is computed *under the hypothesis*, so no interval shrinks to nothing at 0% or 100%. Half a made-up group that differs
as much as possible is added: with 20 groups intervals are about twice as wide, with 100 hardly wider. Coverage and what
was tried: infra/decisions/0029-the-unit-is-the-split-group.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

MADE_UP_GROUPS = 0.5
MOST_FREEDOM = 1e7  # Student's t with as many degrees of freedom is the normal distribution


@dataclass(frozen=True, slots=True)
class ClusteredMean:
    """Mean over problems of a number in −1..1 each, and how the means of their groups differ.

    `num_groups` is the effective number of groups of equal size (Kish). `variance` is that of one such group's mean
    (CR1), so the mean has variance/num_groups, with `freedom` degrees of freedom. `size` is the mean of the groups'
    absolute means.
    """

    mean: float
    variance: float
    size: float
    num_groups: float
    freedom: float


def clustered_mean(values: Sequence[float], groups: Sequence[Hashable]) -> ClusteredMean:
    """`groups` has one entry per value.

    Variance: Cameron, Gelbach and Miller 2008 (doi:10.1162/rest.90.3.414). Degrees of freedom: Satterthwaite's
    2·E²/Var, from the fourth moment; they are few where a few groups cause all the spread.
    """
    import numpy as np

    if not len(values):
        raise ValueError("no problem was measured, so there is no interval. Give at least one problem.")
    numbers = np.asarray(values, dtype=np.float64)
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    labels = [*map(places.__getitem__, groups)]
    sums, sizes = np.bincount(labels, numbers), np.bincount(labels, np.ones(len(labels)))
    mean, num, weight = float(numbers.mean()), len(sums), float((sizes**2).sum())
    squares = (sums - sizes * mean) ** 2
    total = float(squares.sum())
    unevenness = float((squares**2).sum()) - total**2 / num
    differs = num > 1 and total > 1e-12 * weight
    return ClusteredMean(
        mean=mean,
        variance=total / weight * num / (num - 1) if differs else 0.0,
        size=float((sizes * np.abs(sums)).sum()) / weight,
        num_groups=len(numbers) ** 2 / weight,
        freedom=min(num - 1.0, 2 * total**2 / unevenness if unevenness > 0 else math.inf) if differs else MOST_FREEDOM,
    )


def clustered_interval(
    success_by_problem: Sequence[float],
    groups: Sequence[Hashable],
    *,
    confidence: float,
    num_episodes: int | None = None,
) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem success rates.

    With one sample per problem and one problem per group it is Wilson's score interval: 0 of 500 gives (0, 0.0076).
    `num_episodes`, where known, bounds the number of independent observations. Source: Wilson's on the effective
    number, recommended by Franco et al. 2019 (doi:10.1093/jssam/smy019).
    """
    check_confidence(confidence)
    found = clustered_mean(success_by_problem, groups)
    most = found.mean * (1 - found.mean)  # variance of one group: each solved always or never
    share = (found.variance * found.num_groups + MADE_UP_GROUPS) / (most * found.num_groups + MADE_UP_GROUPS)
    share = min(1.0, max(share, found.num_groups / num_episodes if num_episodes else 0.0)) if found.variance else 1.0
    freedom = found.freedom if share < 1 else MOST_FREEDOM  # the largest variance is no estimate

    def tail(true: float) -> float:
        return _tail(found, true, share * true * (1 - true), freedom)

    return _not_rejected(tail, found.mean, 0.0, 1.0, (1 - confidence) / 2)


def paired_interval(
    differences: Sequence[float], groups: Sequence[Hashable], *, confidence: float
) -> tuple[float, float]:
    """As `clustered_interval`, of differences in −1..1: Tango's score interval where groups are single samples, by
    Student's t.
    """
    check_confidence(confidence)
    found = clustered_mean(differences, groups)
    most = _step(found)

    def tail(true: float) -> float:
        return _tail(found, true, paired_variance(found, true), found.freedom)

    return _not_rejected(tail, found.mean, -most, most, (1 - confidence) / 2)


def difference_p_value(differences: Sequence[float], groups: Sequence[Hashable], *, above: float) -> float:
    """One-sided p-value: small where the true mean difference is shown to be above `above`.

    It is at most α exactly where the lower end of `paired_interval` at confidence 1 − 2α is not below `above`. With
    `above` = −margin it tests non-inferiority (Tango 1998).
    """
    found = clustered_mean(differences, groups)
    tail = _tail(found, above, paired_variance(found, above), found.freedom)
    return tail if found.mean >= above else 1 - tail


def paired_variance(found: ClusteredMean, true: float) -> float:
    """Variance of one group's mean difference, were `true` the mean.

    Groups gain, lose or tie by a step; the share that loses is estimated under the constraint that gains exceed it by
    `true`. With one problem per group and one sample each the step is 1 and this is Tango's variance. Source: Tango
    1998, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statist. Med. 17, equations 7 and 8.
    """
    step = _step(found)
    mean, true = found.mean / step, true / step
    if abs(true) >= 1:
        return 0.0
    differing = min(1.0, max((found.mean**2 + found.variance) / step**2, abs(mean)))
    lost = (differing - mean) / 2
    b = -differing + (2 - mean) * true
    losing = (math.sqrt(max(0.0, b * b + 8 * lost * true * (1 - true))) - b) / 4
    return max(0.0, 2 * losing + true * (1 - true)) * step**2


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(
            f"confidence = {confidence} is not between 0 and 1, so there is no such interval. Use 0.95, for example."
        )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _step(found: ClusteredMean) -> float:
    """By how much a group differs if it does. Made-up groups count, else rarely losing whole groups looks harmless."""
    made_up = MADE_UP_GROUPS / found.num_groups
    step = (found.mean**2 + found.variance + made_up) / (found.size + made_up)
    return min(1.0, max(step, abs(found.mean)))


def _tail(found: ClusteredMean, true: float, variance: float, freedom: float) -> float:
    """Chance of a mean at least as far from `true`, on the same side, if one group's mean has this `variance`. The
    variance beyond what groups show is known, so Satterthwaite's rule raises the degrees of freedom.
    """
    from scipy.special import stdtr

    if found.mean == true:
        return 0.5
    if variance <= 0:
        return 0.0
    if found.variance > 0:
        freedom = min(MOST_FREEDOM, freedom * max(1.0, variance / found.variance) ** 2)
    return float(stdtr(freedom, -abs(found.mean - true) / math.sqrt(variance / found.num_groups)))


def _not_rejected(
    tail: Callable[[float], float], mean: float, least: float, most: float, level: float
) -> tuple[float, float]:
    """The lowest and the highest true value whose tail is at least `level`."""
    from scipy.optimize import brentq

    def beyond(true: float) -> float:
        return tail(true) - level

    low = brentq(beyond, least, mean) if mean > least and beyond(least) < 0 else least
    high = brentq(beyond, mean, most) if mean < most and beyond(most) < 0 else most
    return float(low), float(high)
