"""What a policy saves of what another costs an episode, in sampled tokens or calls, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from tasks.measurement.statistics import is_measured
from tasks.records import Trajectory

COSTS: dict[str, Callable[[Trajectory], int]] = {
    "sampled_tokens": lambda item: item.num_sampled_tokens,
    "calls": lambda item: item.num_calls,
}


def saving(
    challenger: Sequence[Trajectory],
    other: Sequence[Trajectory],
    cost: Callable[[Trajectory], int],
    *,
    confidence: float,
) -> dict[str, float] | None:
    """Which share of the other's mean cost an episode the challenger saves, with an interval clustered by problem.

    The ratio of two means over the same problems, its variance from the residuals a − R·b: costs 1 and 3 against 2 and
    6 save exactly half, ±0. None where fewer than two problems were measured for both, or the other costs nothing.
    Source: the ratio estimator of survey sampling, Cochran 1977, Sampling Techniques, §6.3.
    """
    from scipy.special import stdtrit

    ours, theirs = _cost_by_problem(challenger, cost), _cost_by_problem(other, cost)
    pairs = [(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    n = len(pairs)
    mean, other_mean = (math.fsum(side) / max(1, n) for side in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if n < 2 or other_mean == 0:
        return None
    ratio = mean / other_mean
    variance = math.fsum((a - ratio * b) ** 2 for a, b in pairs) / (n - 1)
    half_width = float(stdtrit(n - 1, 0.5 + confidence / 2)) * math.sqrt(variance / n) / other_mean
    numbers = {
        "challenger": mean,
        "other": other_mean,
        "saving": 1 - ratio,
        "ci_low": 1 - ratio - half_width,
        "ci_high": 1 - ratio + half_width,
    }
    return {name: round(value, 6) for name, value in numbers.items()}


def _cost_by_problem(items: Sequence[Trajectory], cost: Callable[[Trajectory], int]) -> dict[str, float]:
    costs: dict[str, list[int]] = defaultdict(list)
    for item in items:
        if is_measured(item):
            costs[item.problem_id].append(cost(item))
    return {key: sum(values) / len(values) for key, values in costs.items()}
