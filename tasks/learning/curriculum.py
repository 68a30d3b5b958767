"""Which problems an iteration trains on: a seeded draw, uniform or weighted towards the categories that still fail."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from tasks.learning.options import GRPOSettings
from tasks.records import Group, Problem

UNKNOWN_SUCCESS = 0.5  # a category not met yet counts as half solved


class ProblemSampler:
    """Draws problems without repeats inside an iteration; `learn` tells it how the groups went.

    Adaptive: a category is drawn with weight `adaptive_floor` + 1 − its running success, so what is solved gives way to
    what is not. Uniform: every problem is as likely as any other.
    """

    def __init__(self, problems: Sequence[Problem], settings: GRPOSettings, *, seed: int):
        self.settings, self.seed = settings, seed
        self.by_category: dict[str, list[Problem]] = defaultdict(list)
        for problem in problems:
            self.by_category[problem.category].append(problem)
        self.success = dict.fromkeys(sorted(self.by_category), UNKNOWN_SUCCESS)

    def draw(self, iteration: int) -> list[Problem]:
        rng = random.Random(f"problems/{self.seed}/{iteration}")
        everything = [problem for problems in self.by_category.values() for problem in problems]
        count = min(self.settings.problems_per_iteration, len(everything))
        if self.settings.problem_sampler == "uniform":
            return rng.sample(everything, count)
        names = list(self.success)
        weights = [self.settings.adaptive_floor + 1 - self.success[name] for name in names]
        drawn: dict[str, Problem] = {}
        while len(drawn) < count:
            problem = rng.choice(self.by_category[rng.choices(names, weights)[0]])
            drawn[problem.id] = problem
        return list(drawn.values())

    def learn(self, groups: Sequence[Group]) -> None:
        """Move each category's running success towards what its groups just reached."""
        for group in groups:
            reached = sum(trajectory.is_success for trajectory in group.trajectories) / len(group.trajectories)
            known = self.success[group.category]
            self.success[group.category] = known + self.settings.adaptive_update_rate * (reached - known)
