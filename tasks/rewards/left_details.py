"""What an environment left for the reward in its verdict's details. What is missing is an error, never a 0: the policy
is not at fault for a judge that was not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.core.records import Trajectory


def left_details(trajectory: Trajectory, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """`trajectory.details[name]`; ValueError in one line unless it is a dict with `keys`."""
    left = trajectory.details.get(name)
    if not isinstance(left, dict) or not set(keys) <= left.keys():
        raise ValueError(
            f"details of problem {trajectory.problem_id!r} (the episode ended in {trajectory.outcome}): there is no "
            f"{name} with {' and '.join(keys)}, which a part of the reward reads, so the episode cannot be scored. Use "
            f"an environment that leaves it in its verdict's details, or take the part out of reward.parts."
        )
    return left


def judged_share(trajectory: Trajectory, key: str) -> float:
    """A number from 0 to 1 from `details["judge"][key]`."""
    value = left_details(trajectory, "judge", (key,))[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:  # NaN is not either
        raise ValueError(
            f"details of problem {trajectory.problem_id!r}: judge.{key} is no number from 0 to 1, so it could "
            f"outweigh success or spoil the weights. Correct what leaves it there."
        )
    return float(value)
