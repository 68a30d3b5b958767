"""Episodes that the environment lost (`environment_error`), counted in the worst case for the challenger.

Losses are not luck: a challenger whose failures make a tool crash would look better for them. So evidence for it must
also hold with each of its lost episodes a failure and each of the other's a success (Horowitz and Manski 2000,
doi:10.1080/01621459.2000.10473902). Evidence against it must hold as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.core.records import Outcome, Trajectory
from tasks.measurement.points import points, points_text
from tasks.measurement.statistics import (
    Difference,
    Success,
    compare_success,
    groups_by_problem,
    paired_difference,
)
from tasks.stages.promote.checks.check import Check, p_text


@dataclass(frozen=True, slots=True)
class Sides:
    challenger: list[Trajectory]
    other: list[Trajectory]

    @property
    def num_lost(self) -> tuple[int, int]:
        """The challenger's and the other's."""
        counts = [sum(item.is_lost for item in side) for side in (self.challenger, self.other)]
        return counts[0], counts[1]

    @property
    def is_whole(self) -> bool:
        return not any(self.num_lost)

    @property
    def groups(self) -> dict[str, str]:
        return groups_by_problem(self.challenger)

    def in_the_worst_case(self) -> Sides:
        """Nothing lost: the challenger's lost episodes failed, the other's succeeded."""
        if self.is_whole:
            return self
        return Sides(_end_lost(self.challenger, "failure"), _end_lost(self.other, "success"))

    def by_category(self) -> dict[str, Sides]:
        names = sorted({item.category for item in self.challenger})
        return {
            name: Sides(*([item for item in side if item.category == name] for side in (self.challenger, self.other)))
            for name in names
        }

    def share_problem(self) -> bool:
        measured = [{item.problem_id for item in side if not item.is_lost} for side in (self.challenger, self.other)]
        return bool(measured[0] & measured[1])

    def compare(self, *, confidence: float) -> Difference:
        return paired_difference(self.challenger, self.other, confidence=confidence)


def check_lost(sides: Sides, *, most: float, confidence: float) -> Check:
    """Passes unless the challenger loses more episodes than the other, by over `most` of all and with evidence: the
    one-sided sign-flip test by split group, at (1 − confidence)/2. Failing only holds the challenger, since the two may
    have been measured in different weeks.
    """
    ours, theirs = _lost_by_problem(sides.challenger), _lost_by_problem(sides.other)
    found = compare_success(ours, theirs, sides.groups, confidence=confidence)
    passed = found["difference"] <= most or found["p_greater"] > (1 - confidence) / 2
    shares = [sum(item.is_lost for item in side) / len(side) for side in (sides.challenger, sides.other)]
    sentence = f"The environment lost {shares[0]:.1%} of its episodes and {shares[1]:.1%} of the other's"
    if sides.is_whole:
        sentence = "The environment lost no episode of either."
    elif passed:
        sentence += ": no evidence of losing over promote.max_extra_lost_share more, and they count against it above."
    else:
        sentence += (
            f", which is {points(found['difference'])} points ({p_text(found['p_greater'])}) and above "
            f"promote.max_extra_lost_share ({points_text(most)}): find out what its calls do to the tools, "
            f"then evaluate again."
        )
    numbers = {"challenger": shares[0], "other": shares[1], "limit": most, **found}
    return Check("lost_episodes", passed, False, sentence, numbers)


def _end_lost(items: Sequence[Trajectory], outcome: Outcome) -> list[Trajectory]:
    return [replace(item, outcome=outcome) if item.is_lost else item for item in items]


def _lost_by_problem(items: Sequence[Trajectory]) -> Success:
    lost: Success = {}
    for item in items:
        lost.setdefault(item.problem_id, []).append(item.is_lost)
    return lost
