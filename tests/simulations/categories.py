"""Eleven categories of 13 to 43 problems with two samples each, as a small test set has them: what an equal challenger
is accused of, and whether a fall in one of them is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.commands.compare import compare_categories
from tasks.core.records import Trajectory
from tasks.stages.promote.checks.categories import category_rows
from tasks.stages.promote.checks.lost_episodes import Sides
from tasks.stages.promote.settings import CategorySettings
from tests.simulations.episodes import episodes
from tests.simulations.policies import World, as_success
from tests.simulations.rates import Rate

SIZES = (13, 16, 19, 22, 25, 28, 31, 34, 37, 40, 43)
SUCCESS = 0.947  # the demo's champion
FALLING = SIZES.index(40)
OPTIONS = CategorySettings(max_loss=0.05, false_alarm=0.2, never_fall=[])


def draw_sides(rng: np.random.Generator, fall: tuple[float, float] | None) -> Sides:
    """A champion and a challenger that are equal, but for one category where they succeed at the rates of `fall`."""
    ours: list[Trajectory] = []
    theirs: list[Trajectory] = []
    for number, size in enumerate(SIZES):
        world = World(num_groups=size, problems_per_group=1)
        before, after = fall if fall and number == FALLING else (SUCCESS, SUCCESS)
        difficulty, groups = world.draw_difficulty(rng), {f"p{n:05d}": f"{number}-{n}" for n in range(size)}
        for side, rate in ((theirs, before), (ours, after)):
            played = world.play(rng, rate, difficulty, world.draw_policy(rng), samples=2)
            of_category = episodes(as_success(played), groups, category=f"c{number:02d}")
            for item in of_category:
                item.problem_id = f"{number}-{item.problem_id}"
            side += of_category
    return Sides(ours, theirs)


def judged(num_trials: int, seed: int, fall: tuple[float, float] | None) -> Iterator[dict[str, Any]]:
    """The categories of each trial, as the policy judges them."""
    rng = np.random.default_rng(seed)
    for _ in range(num_trials):
        parts = draw_sides(rng, fall).by_category()
        yield category_rows(OPTIONS, parts, confidence=0.95, power=0.8)


def simulate_an_equal_challenger_is_held_for_a_category(num_trials: int, seed: int) -> list[float]:
    return [float(any(row["loses"] for row in rows.values())) for rows in judged(num_trials, seed, None)]


def simulate_an_equal_challenger_is_accused_of_a_fall(num_trials: int, seed: int) -> list[float]:
    return [float(any(row["falls"] for row in rows.values())) for rows in judged(num_trials, seed, None)]


def simulate_a_category_that_falls_holds(num_trials: int, seed: int) -> list[float]:
    name = f"c{FALLING:02d}"
    return [float(rows[name]["loses"] or rows[name]["falls"]) for rows in judged(num_trials, seed, (0.98, 0.88))]


def simulate_a_loss_as_large_as_told_is_seen(num_trials: int, seed: int) -> list[float]:
    """The challenger loses in one category what the page of the decision says would be seen in four of five."""
    name, fall = f"c{FALLING:02d}", 0.12
    rows = [rows[name] for rows in judged(max(1, num_trials // 4), seed, (SUCCESS, SUCCESS - fall))]
    told = float(np.mean([row["detectable_loss"] for row in rows]))
    return [float(rows[name]["loses"]) for rows in judged(num_trials, seed, (SUCCESS, SUCCESS - told))]


def simulate_compare_tells_two_equal_policies_apart(num_trials: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    sides = (draw_sides(rng, None) for _ in range(num_trials))
    found = (compare_categories(side.other, side.challenger, confidence=0.95)[0] for side in sides)
    return [float(any(row["word"] != "unclear" for row in rows.values())) for rows in found]


RATES = (
    Rate(
        claim="an equal challenger is held for any of 11 categories",
        simulate=simulate_an_equal_challenger_is_held_for_a_category,
        num_trials=250,
        stated=OPTIONS.false_alarm,
        before="not held",
    ),
    Rate(
        claim="an equal challenger is rejected for any of 11 categories",
        simulate=simulate_an_equal_challenger_is_accused_of_a_fall,
        num_trials=250,
        stated=0.05,
        regression_bound=0.005,
    ),
    Rate(
        claim="98 → 88% in a category of 40 problems is held or rejected",
        simulate=simulate_a_category_that_falls_holds,
        num_trials=500,
        stated=None,
        bound="least",
        regression_bound=0.7,
        before="20% (39% in the issue)",
    ),
    Rate(
        claim="the loss in a category that decision.json says is seen in 80%",
        simulate=simulate_a_loss_as_large_as_told_is_seen,
        num_trials=250,
        stated=None,
        bound="least",
        regression_bound=0.8,
        before="not told",
    ),
    Rate(
        claim="compare calls any of 11 categories of equal policies better or worse",
        simulate=simulate_compare_tells_two_equal_policies_apart,
        num_trials=300,
        stated=0.05,
        before="22%",
        regression_bound=0.01,
    ),
)
