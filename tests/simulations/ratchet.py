"""A year of challengers that are cheaper and a little worse: how far success may sink, one promotion after another.

Every night's challenger is two fifths cheaper than the champion and truly `STEP` worse; on every seventh it is dearer
and better, as good as it may be and still `SHORT` below the first champion. So nobody is ever better than the first,
and what is lost against it is lost for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from tasks.core.records import Trajectory
from tasks.measurement.statistics import Success
from tasks.stages.promote.checks.cost import Anchor, check_cheaper
from tasks.stages.promote.checks.lost_episodes import Sides
from tasks.stages.promote.policy import check_better, is_next_anchor
from tasks.stages.promote.settings import CheaperSettings, PolicySettings
from tests.simulations.episodes import episodes
from tests.simulations.lost import POLICY
from tests.simulations.policies import Floats, World, as_success
from tests.simulations.rates import Rate

NUM_NIGHTS, PER_YEAR = 60, 0.1
ALPHA = PER_YEAR / NUM_NIGHTS  # the error of one night, of a budget of 10% for all of them
MARGIN, STEP, SHORT = 0.06, 0.01, 0.01
WORLD = World(num_groups=500, problems_per_group=2, policy_spread=0.2)
SUCCESS = 0.9
SCREEN = 0.9  # of the normal quantile
OPTIONS = CheaperSettings(measure="calls", max_success_loss=MARGIN, min_saving=0.1)
RULES: PolicySettings = POLICY.model_copy(update={"or_cheaper": OPTIONS})


@dataclass(frozen=True, slots=True)
class Player:
    """A model: its true success, and its episodes on the year's problems."""

    success: float
    solved: Success
    solved_array: Floats
    calls: int

    def episodes(self) -> list[Trajectory]:
        return episodes(self.solved, GROUPS, calls=self.calls)


GROUPS = WORLD.groups()


def play_year(rng: np.random.Generator, *, weekly_gain: bool, is_anchored: bool = True) -> list[float]:
    """The true success of the champion after each night; `is_anchored` False holds it to the champion alone."""
    difficulty = WORLD.draw_difficulty(rng)
    champion = _play(rng, SUCCESS, difficulty, calls=10**30)
    anchor, successes = champion, []
    for night in range(1, NUM_NIGHTS + 1):
        is_better = weekly_gain and night % 7 == 0
        success = max(champion.success, SUCCESS - SHORT) if is_better else champion.success - STEP
        calls = champion.calls if is_better else champion.calls * 3 // 5
        challenger = _play(rng, success, difficulty, calls=calls)
        if _passes(challenger, champion, anchor if is_anchored else champion):
            champion = challenger
            if is_next_anchor(champion.episodes(), Anchor("", anchor.episodes()), alpha=ALPHA):
                anchor = champion
        successes.append(champion.success)
    return successes


def _play(rng: np.random.Generator, success: float, difficulty: Floats, *, calls: int) -> Player:
    played = WORLD.play(rng, success, difficulty, WORLD.draw_policy(rng), samples=1)
    return Player(success, as_success(played), played[:, 0].astype(float), calls)


def _passes(challenger: Player, champion: Player, anchor: Player) -> bool:
    """By the product's own checks, where a quick look does not rule a way out."""
    gain = _quick_z(challenger, champion, above=0.0)
    losses = [_quick_z(challenger, other, above=-MARGIN) for other in (champion, anchor)]
    if gain <= SCREEN and min(losses) <= SCREEN:
        return False
    sides = Sides(challenger.episodes(), champion.episodes())
    if gain > SCREEN and check_better(RULES, sides, None, "the champion", alpha=ALPHA).passed:
        return True
    of_anchor = Anchor("the anchor", anchor.episodes())
    return check_cheaper(OPTIONS, sides, of_anchor, alpha=ALPHA, other_name="the champion").passed


def _quick_z(challenger: Player, other: Player, *, above: float) -> float:
    """The mean difference in standard errors above so much, in normal quantiles of alpha; no test here passes at less
    than `SCREEN`.
    """
    difference = challenger.solved_array - other.solved_array
    error = max(1e-9, float(difference.std())) / np.sqrt(len(difference))
    return float((difference.mean() - above) / error / ndtri(1 - ALPHA))


def _sinks(years: Sequence[list[float]]) -> list[float]:
    return [float(min(successes) < SUCCESS - MARGIN - 1e-9) for successes in years]


def simulate_cheaper_champions_sink_below_the_margin(num_trials: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return _sinks([play_year(rng, weekly_gain=False) for _ in range(num_trials)])


def simulate_cheaper_and_better_champions_in_turn_sink_below_the_margin(num_trials: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return _sinks([play_year(rng, weekly_gain=True) for _ in range(num_trials)])


# The eight years of make test refuse three that sink: of a rate of 50% in 86% of cases, of 80% all but surely.
RATES = (
    Rate(
        claim="a year of cheaper champions ends below the first one's margin",
        simulate=simulate_cheaper_champions_sink_below_the_margin,
        num_trials=40,
        stated=PER_YEAR,
        before="100% with the champion alone as yardstick",
        regression_bound=0.02,
    ),
    Rate(
        claim="a year of cheaper and better champions in turn ends below it",
        simulate=simulate_cheaper_and_better_champions_in_turn_sink_below_the_margin,
        num_trials=40,
        stated=PER_YEAR,
        before="83% with the champion alone as yardstick",
        regression_bound=0.02,
    ),
)
