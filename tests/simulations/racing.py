"""What racing promises where snapshots differ by split group: how often it drops the truly best one, and for what."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np

from tasks.core.records import Problem
from tasks.measurement.statistics import Success
from tasks.stages.evaluate.racing import Race, Round, race
from tasks.stages.evaluate.settings import RacingSettings
from tests.simulations.policies import World
from tests.simulations.rates import Rate

EVIDENCE_ALONE = RacingSettings(error_rate=0.2, num_rounds=4, min_problems=10, max_finalists=None)
AS_SHIPPED = RacingSettings(error_rate=0.05, num_rounds=4, min_problems=20, max_finalists=4)
SMALL = World(num_groups=24, problems_per_group=5, policy_spread=1.0)
DEMO = World(num_groups=110, problems_per_group=5, group_spread=1.0, problem_spread=1.5, policy_spread=0.3)


@lru_cache(maxsize=4)
def problems_of(world: World) -> list[Problem]:
    """Problems of which only the id and the split group matter."""
    return [
        Problem.model_construct(
            id=problem, category="c", level=1, requests=[], world={}, reference=[], split_group=group
        )
        for problem, group in world.groups().items()
    ]


def run_race(rng: np.random.Generator, world: World, rules: RacingSettings, successes: list[float], trial: int) -> Race:
    """Snapshots of these mean successes, each with an opinion of its own on every group."""
    difficulty, ids = world.draw_difficulty(rng), list(world.groups())
    played: dict[str, dict[str, Any]] = {}
    for number, success in enumerate(successes):
        episodes = world.play(rng, success, difficulty, world.draw_policy(rng), samples=1)
        played[f"iteration-{number:04d}"] = dict(zip(ids, episodes.tolist(), strict=True))

    def play(block: Round) -> dict[str, Success]:
        return {name: {problem.id: played[name][problem.id] for problem in block.problems} for name in block.snapshots}

    return race(list(played), problems_of(world), play, rules, seed=trial)


def simulate_racing_drops_the_best_as_worse(num_trials: int, seed: int) -> list[float]:
    """The hardest case: 15 others that are equal to it."""
    rng = np.random.default_rng(seed)
    races = (run_race(rng, SMALL, EVIDENCE_ALONE, [0.7] * 16, trial) for trial in range(num_trials))
    return [float("iteration-0000" in race.dropped) for race in races]


def simulate_racing_has_no_place_for_the_best(num_trials: int, seed: int, *, lead: float) -> list[float]:
    rng = np.random.default_rng(seed)
    found = []
    for trial in range(num_trials):
        outcome = run_race(rng, DEMO, AS_SHIPPED, [0.9 + lead, *[0.9] * 10], trial)
        found.append(float(outcome.dropped.get("iteration-0000", {}).get("reason") == "no_place"))
    return found


RATES = (
    Rate("racing drops the best of 16 equal snapshots as worse, error_rate 20%, runs differ by group",
         simulate_racing_drops_the_best_as_worse, 2500, 0.2, "most", 0.089, 0.033),
    *(
        Rate(f"racing has no place for the best of 11, which leads by {100 * lead:.0f} points",
             partial(simulate_racing_has_no_place_for_the_best, lead=lead), 250, None, "most", "", regression_bound)
        for lead, regression_bound in ((0.01, 0.4), (0.03, 0.08))
    ),
)  # fmt: skip
