"""Which problems an iteration trains on: a seeded draw, in shuffled epochs, weighted towards what still fails, or
towards what is solved sometimes.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tasks.core.records import Group, Problem
from tasks.learning.grpo.exploration import samples_at
from tasks.learning.grpo.signal import share_without_signal
from tasks.learning.grpo.solve_rates import Beta, Played, SolveRates, difficulty, probabilities_between
from tasks.learning.shared.settings import GRPOSettings

UNKNOWN_SUCCESS = 0.5  # of a category not drawn yet


class ProblemSampler:
    """Draws problems without repeats inside an iteration; `learn` updates it with the results of the groups.

    Adaptive: a category is drawn with weight `adaptive_floor` + 1 − its running success. Uniform: every problem once
    per epoch, in an order shuffled anew each time. Band: see `Band`, which begins with the episodes of `baseline`.
    """

    def __init__(
        self, problems: Sequence[Problem], settings: GRPOSettings, *, seed: int, baseline: Sequence[Played] = ()
    ):
        self.settings, self.seed = settings, seed
        self.problems = {problem.id: problem for problem in problems}
        self.by_category: dict[str, list[Problem]] = defaultdict(list)
        for problem in problems:
            self.by_category[problem.category].append(problem)
        self.success = dict.fromkeys(sorted(self.by_category), UNKNOWN_SUCCESS)
        self.epoch = 0
        self.remaining: list[str] = []
        self.drawn_now: set[str] = set()
        self.baseline = baseline
        self.band = Band(problems, settings, baseline) if settings.problem_sampler == "band" else None

    def draw(
        self, iteration: int, round_number: int, num_problems: int, *, draw_number: int | None = None
    ) -> list[Problem]:
        """Up to `num_problems` that this iteration has not drawn; later rounds replace groups without signal. A draw's
        own number seeds it where an iteration may have several first ones.
        """
        if round_number == 0:
            self.drawn_now.clear()
        count = min(num_problems, len(self.problems) - len(self.drawn_now))
        number = iteration if draw_number is None else draw_number
        key = (self.seed, number, round_number) if round_number else (self.seed, number)
        rng = random.Random("/".join(map(str, ("problems", *key))))
        if self.settings.problem_sampler == "uniform":
            drawn = [self._next_of_epoch() for _ in range(count)]
        elif self.band is None:
            drawn = self._weighted(rng, count)
        else:
            drawn = self.band.draw(rng, iteration, count, drawn_before=self.drawn_now)
            self.drawn_now.update(drawn)
        return [self.problems[name] for name in drawn]

    def learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            solved = sum(trajectory.is_success for trajectory in group.trajectories)
            reached = solved / len(group.trajectories)
            known = self.success[group.category]
            self.success[group.category] = known + self.settings.adaptive_update_rate * (reached - known)
            if self.band is not None:
                self.band.rates.add_all([Played(self.problems[group.problem_id], solved, len(group.trajectories))])

    def solve_rates(self) -> dict[str, Beta]:
        """What is known of each problem, by id; from the baseline alone where the sampler does not ask."""
        if self.band is not None:
            return self.band.rates.posteriors()
        rates = SolveRates(list(self.problems.values()), self.settings.band)
        rates.add_all(self.baseline)
        return rates.posteriors()

    def weights(self) -> dict[str, float]:
        """How often each problem is drawn now, by id, up to a factor."""
        if self.band is not None:
            return self.band.weights(self.band.rates.posteriors())
        if self.settings.problem_sampler == "uniform":
            return dict.fromkeys(self.problems, 1.0)
        floor, of_category = self.settings.adaptive_floor, self.by_category
        return {
            problem.id: (floor + 1 - self.success[name]) / len(of_category[name])
            for name in of_category
            for problem in of_category[name]
        }

    def metrics(self) -> dict[str, float]:
        """Of the last draw, for the row of metrics; empty where the sampler expects nothing."""
        return {} if self.band is None else self.band.metrics()

    def state(self) -> dict[str, Any]:
        own = {} if self.band is None else {"band": self.band.state()}
        return {"success": dict(self.success), "epoch": self.epoch, "remaining": list(self.remaining), **own}

    def load_state(self, state: dict[str, Any]) -> None:
        self.success, self.epoch, self.remaining = dict(state["success"]), state["epoch"], list(state["remaining"])
        if self.band is not None:
            self.band.load_state(state["band"])

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
        left = {
            name: sum(problem.id not in self.drawn_now for problem in problems)
            for name, problems in self.by_category.items()
        }
        weights = {name: self.settings.adaptive_floor + 1 - self.success[name] if left[name] else 0.0 for name in names}
        drawn: list[str] = []
        while len(drawn) < count:
            (name,) = rng.choices(names, [*weights.values()])
            problem = rng.choice(self.by_category[name])
            if problem.id in self.drawn_now:
                continue
            self.drawn_now.add(problem.id)
            drawn.append(problem.id)
            left[name] -= 1
            if not left[name]:
                weights[name] = 0.0
        return drawn


class Band:
    """Draws problems by the posterior probability that their solve rate is between `low` and `high`.

    A share of the draws, `uniform_share`, is over all problems alike, closed levels included, so nothing starves. With
    `levels` the rest is over the open levels: the lowest at first, and the next one as soon as the solve rate of the
    highest open level is at least `open_at` with probability `confidence`. A level once open stays open.
    """

    def __init__(self, problems: Sequence[Problem], settings: GRPOSettings, baseline: Sequence[Played] = ()):
        self.settings, self.training = settings.band, settings
        self.rates = SolveRates(problems, self.settings)
        self.rates.add_all(baseline)
        self.level_of = {problem.id: difficulty(problem, self.rates.difficulty) for problem in problems}
        self.levels = sorted(set(self.level_of.values()))
        self.num_open = len(self.levels) if self.settings.levels is None else 1
        self.expected_informative_share = 0.0

    def draw(self, rng: random.Random, iteration: int, count: int, *, drawn_before: set[str]) -> list[str]:
        """`count` ids, none of them drawn before. Weighted, without repeats: Efraimidis and Spirakis 2006
        (doi:10.1016/j.ipl.2005.11.003), the largest log(u)/weight.
        """
        self.rates.forget(iteration)
        posteriors = self.rates.posteriors()
        self._open_levels(posteriors)
        weights = self.weights(posteriors)
        keys = {name: math.log(1 - rng.random()) / weight for name, weight in weights.items()}
        drawn = sorted((name for name in keys if name not in drawn_before), key=lambda name: -keys[name])[:count]
        if not drawn_before:
            size = samples_at(self.training, iteration)
            shares = [1 - share_without_signal(posteriors[name], size) for name in drawn]
            self.expected_informative_share = sum(shares) / max(1, len(shares))
        return drawn

    def weights(self, posteriors: dict[str, Beta]) -> dict[str, float]:
        """The probability of each problem in one draw, by id; they add up to 1."""
        settings, count = self.settings, len(self.level_of)
        highest = self.levels[self.num_open - 1]
        in_band = probabilities_between(list(posteriors.values()), settings.low, settings.high)
        open_weights = {
            name: weight if self.level_of[name] <= highest else 0.0
            for name, weight in zip(posteriors, in_band, strict=True)
        }
        total = sum(open_weights.values())
        banded = 1 - settings.uniform_share if total else 0.0
        return {
            name: (1 - banded) / count + (banded * weight / total if total else 0.0)
            for name, weight in open_weights.items()
        }

    def metrics(self) -> dict[str, float]:
        row = {"expected_informative_share": self.expected_informative_share}
        return row if self.settings.levels is None else {**row, "open_level": self.levels[self.num_open - 1]}

    def state(self) -> dict[str, Any]:
        """With the metrics of the last draw, which a batch that streams may report after a resume."""
        last = {"expected_informative_share": self.expected_informative_share}
        return {"rates": self.rates.state(), "num_open": self.num_open, **last}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rates.load_state(state["rates"])
        self.num_open = state["num_open"]
        self.expected_informative_share = state["expected_informative_share"]

    def _open_levels(self, posteriors: dict[str, Beta]) -> None:
        levels = self.settings.levels
        while levels is not None and self.num_open < len(self.levels):
            rate = self.rates.level_rate(self.levels[self.num_open - 1], posteriors)
            if rate is None or probabilities_between([rate], levels.open_at, 1.0)[0] < levels.confidence:
                return
            self.num_open += 1
