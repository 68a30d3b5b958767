"""Intervals of success rates, and of their differences, where samples of one problem are alike.

Numbers in, numbers out: per-problem means of success, or per-problem differences of them. `statistics.py` makes those
from trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def clustered_interval(
    success_by_problem: Sequence[float], *, confidence: float, num_episodes: int | None = None
) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem success rates: Wilson's, on the effective number of samples.

    With one sample a problem this is exactly Wilson's score interval, so 0 of 500 gives (0, 0.0076) and not (0, 0).
    `num_episodes`, where known, bounds the effective number: k samples of a problem are at best k facts.
    Source: Wilson on n_eff is what Franco et al. 2019 (doi:10.1093/jssam/smy019) recommend for clustered proportions.
    """
    from scipy.special import ndtri

    check_confidence(confidence)
    if not success_by_problem:
        raise ValueError("no problem was measured, so there is no interval. Give at least one problem.")
    p, z = mean(success_by_problem), float(ndtri(0.5 + confidence / 2))
    n = _effective_samples(success_by_problem, confidence, num_episodes)
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def paired_interval(differences: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem differences, each in −1..1.

    Before it is taken, two made-up problems join: one weighs ±1 by halves, one is 0. That keeps it honest where every
    difference is equal (0 of 500 against 0 of 500 is 0 ± 0.4 points, not 0 ± 0).
    Source: Agresti and Min 2005 (doi:10.1002/sim.1781), their 0.5 a cell carried over to per-problem means.
    """
    from scipy.special import stdtrit

    check_confidence(confidence)
    total = len(differences) + 2
    center = math.fsum(differences) / total
    variance = (math.fsum(d * d for d in differences) + 1.0) / total - center * center
    half_width = float(stdtrit(total - 1, 0.5 + confidence / 2)) * math.sqrt(variance / total)
    return max(-1.0, center - half_width), min(1.0, center + half_width)


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence} is not between 0 and 1, so no interval has it. Use 0.95, say.")


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _effective_samples(success_by_problem: Sequence[float], confidence: float, num_episodes: int | None) -> float:
    """How many independent samples would be as sure as these n problems: n·p(1−p)/s², between n and `num_episodes`.

    n is a true floor: means in 0..1 vary at most as p(1−p), which is when each problem is solved always or never. Where
    the problems do not differ at all nothing shows how alike its samples are, so the floor is taken. (z/t)² pays for s²
    being an estimate from few problems. Source: Korn and Graubard 1998, Survey Methodology 24.
    """
    from scipy.special import ndtri, stdtrit

    n, p = len(success_by_problem), mean(success_by_problem)
    spread = math.fsum((success - p) ** 2 for success in success_by_problem)
    if n < 2 or spread < 1e-12:
        return n
    few_problems = float(ndtri(0.5 + confidence / 2) / stdtrit(n - 1, 0.5 + confidence / 2)) ** 2
    effective = n * p * (1 - p) / (spread / (n - 1)) * few_problems
    return max(n, min(effective, num_episodes) if num_episodes is not None else effective)
