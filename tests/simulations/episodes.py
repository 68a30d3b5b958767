"""Made-up successes as the episodes that the product reads: nothing in them but what its statistics look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tasks.core.records import Outcome, Trajectory
from tasks.measurement.statistics import Success


def episodes(
    success: Success,
    groups: Mapping[str, str],
    *,
    category: str = "all",
    calls: int = 1,
    lost: Iterable[tuple[str, int]] = (),
) -> list[Trajectory]:
    """One trajectory per sample; those `lost` (problem, sample) ended in an environment error."""
    errors = set(lost)
    return [
        _episode(problem, number, groups[problem], _outcome(is_solved, (problem, number) in errors), category, calls)
        for problem, samples in success.items()
        for number, is_solved in enumerate(samples)
    ]


def _outcome(is_solved: bool, is_lost: bool) -> Outcome:
    return "environment_error" if is_lost else "success" if is_solved else "failure"


def _episode(problem: str, sample: int, group: str, outcome: Outcome, category: str, calls: int) -> Trajectory:
    return Trajectory(
        problem, category, "", 0, sample, 0, "", [], [], outcome, None, {}, calls, 0, split_group=group
    )  # fmt: skip
