"""Episodes that the environment loses where the policy fails: what is left looks better than the policy is."""

from __future__ import annotations

import numpy as np

from tasks.stages.promote.policy import check_all, decision_of
from tasks.stages.promote.settings import PolicySettings
from tests.simulations.episodes import episodes
from tests.simulations.policies import World, as_success
from tests.simulations.rates import Rate

WORLD = World(num_groups=200, problems_per_group=1)
CHALLENGER, CHAMPION = 0.92, 0.96
ALPHA = 0.025
POLICY = PolicySettings.model_validate(
    {
        "minimum_success": 0.6,
        "confidence": 0.95,
        "or_cheaper": None,
        "max_cost_increase": None,
        "categories": {"max_loss": 0.05, "false_alarm": 0.2, "never_fall": []},
        "max_extra_lost_share": 0.1,
        "max_invalid_call_share": 1.0,
        "max_overlong_share": 1.0,
        "power": 0.8,
    }
)


def simulate_a_challenger_whose_failures_are_lost_passes(num_trials: int, seed: int) -> list[float]:
    """Every failure of the challenger ends in an environment error; the champion loses nothing."""
    rng, groups = np.random.default_rng(seed), WORLD.groups()
    passed = []
    for _ in range(num_trials):
        difficulty = WORLD.draw_difficulty(rng)
        theirs, ours = (
            as_success(WORLD.play(rng, rate, difficulty, WORLD.draw_policy(rng), samples=1))
            for rate in (CHAMPION, CHALLENGER)
        )
        lost = [(problem, 0) for problem, (is_solved,) in ours.items() if not is_solved]
        checks = check_all(
            POLICY,
            episodes(ours, groups, lost=lost),
            episodes(theirs, groups),
            alpha=ALPHA,
            anchor=None,
            snapshot="iteration-0010",
            other_name="the champion",
        )
        passed.append(float(decision_of(checks) == "promote"))
    return passed


RATES = (
    Rate(
        claim="a challenger of 92% whose failures are lost passes against 96%",
        simulate=simulate_a_challenger_whose_failures_are_lost_passes,
        num_trials=500,
        stated=ALPHA,
        before="81%",
        regression_bound=0.005,
    ),
)
