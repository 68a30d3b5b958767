"""Which problems an iteration trains on: a seeded draw, in shuffled epochs or weighted towards what still fails."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tasks.core.records import Group, Problem
from tasks.learning.shared.settings import GRPOSettings

UNKNOWN_SUCCESS = 0.5  # of a category not drawn yet


class ProblemSampler:
    """Draws problems without repeats inside an iteration; `learn` updates it with the results of the groups.

    Adaptive: a category is drawn with weight `adaptive_floor` + 1 − its running success. Uniform: every problem once
    per epoch, in an order shuffled anew each time.
    """

    def __init__(self, problems: Sequence[Problem], settings: GRPOSettings, *, seed: int):
        self.settings, self.seed = settings, seed
        self.problems = {problem.id: problem for problem in problems}
        self.by_category: dict[str, list[Problem]] = defaultdict(list)
        for problem in problems:
            self.by_category[problem.category].append(problem)
        self.success = dict.fromkeys(sorted(self.by_category), UNKNOWN_SUCCESS)
        self.epoch = 0
        self.remaining: list[str] = []
        self.drawn_now: set[str] = set()

    def draw(self, iteration: int, round_number: int, num_problems: int) -> list[Problem]:
        """Up to `num_problems` that this iteration has not drawn; later rounds replace groups without signal."""
        if round_number == 0:
            self.drawn_now.clear()
        count = min(num_problems, len(self.problems) - len(self.drawn_now))
        if self.settings.problem_sampler == "uniform":
            drawn = [self._next_of_epoch() for _ in range(count)]
        else:
            key = (self.seed, iteration, round_number) if round_number else (self.seed, iteration)
            drawn = self._weighted(random.Random("/".join(map(str, ("problems", *key)))), count)
        return [self.problems[name] for name in drawn]

    def learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            reached = sum(trajectory.is_success for trajectory in group.trajectories) / len(group.trajectories)
            known = self.success[group.category]
            self.success[group.category] = known + self.settings.adaptive_update_rate * (reached - known)

    def state(self) -> dict[str, Any]:
        return {"success": dict(self.success), "epoch": self.epoch, "remaining": list(self.remaining)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.success, self.epoch, self.remaining = dict(state["success"]), state["epoch"], list(state["remaining"])

    def _next_of_epoch(self) -> str:
        if not set(self.remaining) - self.drawn_now:
            order = sorted(self.problems)
            random.Random(f"epoch/{self.seed}/{self.epoch}").shuffle(order)
            self.remaining += order
            self.epoch += 1
        name = next(name for name in self.remaining if name not in self.drawn_now)
        self.remaining.remove(name)
        self.drawn_now.add(name)
        return name

    def _weighted(self, rng: random.Random, count: int) -> list[str]:
        names = list(self.success)
        weights = [self.settings.adaptive_floor + 1 - self.success[name] for name in names]
        drawn: list[str] = []
        while len(drawn) < count:
            problem = rng.choice(self.by_category[rng.choices(names, weights)[0]])
            if problem.id not in self.drawn_now:
                self.drawn_now.add(problem.id)
                drawn.append(problem.id)
        return drawn
