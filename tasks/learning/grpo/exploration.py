"""How widely training explores, by iteration: temperature, top-p, samples per problem, and which rollouts carry loss.

Pure functions of the iteration and the settings, so that a run that was killed goes on without any state of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tasks.learning.shared.exploration_settings import Point
from tasks.learning.shared.settings import GRPOSettings


def temperature_at(settings: GRPOSettings, iteration: int, *, otherwise: float) -> float:
    """Of the iteration (from 1): linear between the points of `exploration.temperature`, constant after the last.

    The trainer computes log-probs at the temperature the tokens were drawn at, so an iteration stays on-policy.
    """
    points = settings.exploration.temperature if settings.exploration else None
    return otherwise if points is None else on_straight_lines(points, iteration)


def top_p_at(settings: GRPOSettings, iteration: int) -> float:
    """Of the iteration (from 1), as a temperature; 1, the whole distribution, without a schedule."""
    points = settings.exploration.top_p if settings.exploration else None
    return 1.0 if points is None else on_straight_lines(points, iteration)


def draws_by_schedule(settings: GRPOSettings) -> bool:
    """Whether the engine's distribution changes with the iteration."""
    exploration = settings.exploration
    return exploration is not None and not (exploration.temperature is None and exploration.top_p is None)


def on_straight_lines(points: Sequence[Point], iteration: int) -> float:
    """Between the points; after the last, its value."""
    for before, after in pairwise(points):
        if iteration < after.iteration:
            share = (iteration - before.iteration) / (after.iteration - before.iteration)
            return before.value + share * (after.value - before.value)
    return points[-1].value


def samples_at(settings: GRPOSettings, iteration: int) -> int:
    """How often each problem of the iteration (from 1) is played: the value of the last point that was reached."""
    points = settings.exploration.samples_per_problem if settings.exploration else None
    if points is None:
        return settings.group_size
    return next(point.value for point in reversed(points) if point.iteration <= iteration)


def iterations_by_samples(settings: GRPOSettings) -> dict[int, int]:
    """How many of the run's iterations play each problem so often; one entry without a schedule."""
    points = settings.exploration.samples_per_problem if settings.exploration else None
    if points is None:
        return {settings.group_size: settings.num_iterations}
    after = settings.num_iterations + 1
    ends = [min(point.iteration, after) for point in points[1:]] + [after]
    found: dict[int, int] = {}
    for point, end in zip(points, ends, strict=True):
        if end > point.iteration:
            found[point.value] = found.get(point.value, 0) + end - point.iteration
    return found


def max_variance_subset(rewards: Sequence[float], size: int) -> list[int]:
    """The indices, ascending, of `size` of the rewards whose variance is largest; O(n log n).

    Such a subset is the k lowest and the size − k highest for some k, so running sums over the sorted rewards compare
    all k. Of equal rewards the first are lowest. Source: PODS, arXiv:2504.13818.
    """
    if size >= len(rewards):
        return list(range(len(rewards)))
    order = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    centre = sum(rewards) / len(rewards)
    values = [rewards[index] - centre for index in order]
    total = sum(values[-size:])
    squares = sum(value * value for value in values[-size:])
    num_low, largest = 0, squares - total * total / size
    for k in range(1, size + 1):  # the k-th lowest comes in, and the lowest of the high ones goes
        low, high = values[k - 1], values[k - 1 - size]
        total += low - high
        squares += low * low - high * high
        if squares - total * total / size > largest:
            num_low, largest = k, squares - total * total / size
    return sorted([*order[:num_low], *order[len(order) - size + num_low :]])
