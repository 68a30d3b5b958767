"""Made-up policies on made-up problems: success that is alike within a problem and within a split group.

The log-odds of a success are a level, plus what a group's problems share, plus what is the problem's own, plus what one
policy makes of one group. The last is why two equal policies differ by group: a run learns some groups better than
another run does. All four are normal; `level_for` gives the level at which the mean success is as wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

from tasks.measurement.statistics import Success

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class World:
    """Problems in groups of a category's size each, and how far groups, problems and policies spread in log-odds.

    `policy_spread` 0 makes equal policies equal on every problem. The demo's test set has 550 problems in 97 groups.
    """

    num_groups: int
    problems_per_group: int
    group_spread: float = 1.0
    problem_spread: float = 1.0
    policy_spread: float = 0.5

    @property
    def num_problems(self) -> int:
        return self.num_groups * self.problems_per_group

    def level_for(self, success: float) -> float:
        """The log-odds level at which the mean success of a policy is `success`."""
        return _level(success, float(np.sqrt(self.group_spread**2 + self.problem_spread**2 + self.policy_spread**2)))

    def draw_difficulty(self, rng: np.random.Generator) -> Floats:
        """What groups and problems add to the log-odds of every policy: [num_groups, problems_per_group]."""
        shared = self.group_spread * rng.standard_normal((self.num_groups, 1))
        return shared + self.problem_spread * rng.standard_normal((self.num_groups, self.problems_per_group))

    def draw_policy(self, rng: np.random.Generator) -> Floats:
        """What one policy makes of each group: [num_groups, 1]."""
        return self.policy_spread * rng.standard_normal((self.num_groups, 1))

    def play(
        self, rng: np.random.Generator, success: float, difficulty: Floats, policy: Floats, *, samples: int
    ) -> np.ndarray[Any, Any]:
        """Episodes of a policy of mean `success`: booleans [num_problems, samples]."""
        chance = expit(self.level_for(success) + difficulty + policy).reshape(-1, 1)
        return rng.random((self.num_problems, samples)) < chance

    def groups(self) -> dict[str, str]:
        """The split group of each problem id."""
        return {f"p{number:05d}": f"g{number // self.problems_per_group}" for number in range(self.num_problems)}


def as_success(played: np.ndarray[Any, Any]) -> Success:
    """Episodes [num_problems, samples] as the statistics take them."""
    return {f"p{number:05d}": samples for number, samples in enumerate(played.tolist())}


@lru_cache(maxsize=256)
def _level(success: float, spread: float) -> float:
    """The root of mean(expit(level + spread·z)) = success, z standard normal, by 60 nodes of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)

    def excess(level: float) -> float:
        return float((weights * expit(level + spread * nodes)).sum() / weights.sum() - success)

    return float(brentq(excess, -20, 20))
