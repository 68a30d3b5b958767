"""The share of another policy's cost per episode (sampled tokens or calls) that a policy saves, with an interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from tasks.core.records import Trajectory
from tasks.measurement.statistics import groups_by_problem

Measure = Literal["sampled_tokens", "calls"]
COSTS: dict[Measure, Callable[[Trajectory], int]] = {
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
    """The share of the other's mean cost per episode that the challenger saves, with an interval clustered by split
    group. None where fewer than two groups were measured for both, or the other costs nothing.

    The ratio of two means over the same problems, its variance from the residuals a − R·b summed by group: costs 1 and
    3 against 2 and 6 save exactly half, ±0. Source: Cochran 1977, Sampling Techniques, §6.3 (ratio estimator), §11
    (clusters).
    """
    from scipy.special import stdtrit

    ours, theirs = _cost_by_problem(challenger, cost), _cost_by_problem(other, cost)
    shared = sorted(ours.keys() & theirs.keys())
    groups = groups_by_problem(challenger)
    n, num_groups = len(shared), len({groups[key] for key in shared})
    total, other_total = (math.fsum(side[key] for key in shared) for side in (ours, theirs))
    if num_groups < 2 or other_total == 0:
        return None
    ratio = total / other_total
    residuals: dict[str, float] = defaultdict(float)
    for key in shared:
        residuals[groups[key]] += ours[key] - ratio * theirs[key]
    variance = math.fsum(value**2 for value in residuals.values()) * num_groups / (num_groups - 1)
    half_width = float(stdtrit(num_groups - 1, 0.5 + confidence / 2)) * math.sqrt(variance) / other_total
    numbers = {
        "challenger": total / n,
        "other": other_total / n,
        "saving": 1 - ratio,
        "ci_low": 1 - ratio - half_width,
        "ci_high": 1 - ratio + half_width,
    }
    return {name: round(value, 6) for name, value in numbers.items()}


def _cost_by_problem(items: Sequence[Trajectory], cost: Callable[[Trajectory], int]) -> dict[str, float]:
    costs: dict[str, list[int]] = defaultdict(list)
    for item in items:
        if not item.is_lost:
            costs[item.problem_id].append(cost(item))
    return {key: sum(values) / len(values) for key, values in costs.items()}
