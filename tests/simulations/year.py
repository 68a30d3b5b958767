"""A year of nightly decisions: how often it makes a champion wrongly, and how soon it makes one rightly.

Every night another challenger meets the champion on the test set, which is replaced by the next one after so
many decisions, or never. The champion's episodes on a test set are the same every night; a challenger that is promoted
brings its own along, so that a champion was chosen by the very problems it is measured on next. Test sets share no
split group.

All the nights against one champion on one test set are drawn at once. A night whose gain is far from what the normal
quantile of its alpha asks for is no promotion (`could_pass`; tests/stages/promote/test_error_budget.py holds it against
the product); every other is decided by the product's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtri

from tasks.measurement.statistics import Success, compare_success, non_inferiority_p_value
from tasks.stages.promote.checks.cost import check_cheaper
from tasks.stages.promote.checks.lost_episodes import Sides
from tasks.stages.promote.error_budget import Spending, error_budget
from tasks.stages.promote.policy import check_better
from tasks.stages.promote.settings import CheaperSettings, ErrorBudgetSettings, PolicySettings
from tests.benchmarks.demo import demo_params
from tests.simulations.episodes import episodes
from tests.simulations.policies import Floats, World, as_success
from tests.simulations.rates import Rate

NUM_NIGHTS = 365
SCREEN = 0.7  # of the normal quantile of alpha: below it no test here passes a challenger
MARGIN = 0.02  # promote.or_cheaper.max_success_loss
DEMO = World(num_groups=92, problems_per_group=6)  # the demo's test set: 550 problems in 97 groups
LARGE = World(num_groups=920, problems_per_group=6)
SAMPLES = 2
FIRST_NIGHT = datetime(2026, 1, 1, 2, tzinfo=UTC)

Decide = Callable[[Success, Success, dict[str, str], float], bool]
Counts = np.ndarray[Any, np.dtype[np.int8]]


class Night(NamedTuple):
    """One decision of a year: the true gain of its challenger, and whether it was promoted."""

    number: int
    gain: float
    promoted: bool


@dataclass(frozen=True)
class Year:
    """How a year goes: what challengers gain over the champion of their night, and when the test set is replaced.

    `gains` and `chances` are the true gains of success and how often each occurs; a champion at `ceiling` is not
    exceeded, so that a gain is cut there. `rotate_after` None keeps one test set. `decide` is the test, `alphas` the
    error of each night.
    """

    gains: tuple[float, ...]
    chances: tuple[float, ...]
    rotate_after: int | None
    alphas: tuple[float, ...]
    decide: Decide
    success: float = 0.9
    ceiling: float = 0.98
    world: World = DEMO

    def play(self, rng: np.random.Generator) -> Iterator[Night]:
        """The nights in turn."""
        world, champion = self.world, self.success
        set_size = self.rotate_after or len(self.alphas)
        for first in range(0, len(self.alphas), set_size):
            difficulty = world.draw_difficulty(rng)
            theirs = self._solved(rng, np.array([champion]), difficulty, world.draw_policy(rng)[None])[0]
            night, last = first, min(first + set_size, len(self.alphas))
            while night < last:
                drawn = rng.choice(self.gains, p=self.chances, size=last - night)
                gains = np.minimum(champion + drawn, max(champion, self.ceiling)) - champion
                conducts = world.policy_spread * rng.standard_normal((last - night, world.num_groups, 1))
                ours = self._solved(rng, champion + gains, difficulty, conducts)
                promoted = self._first_promoted(ours, theirs, self.alphas[night:last])
                for index in range(last - night if promoted is None else promoted + 1):
                    yield Night(night + index, float(gains[index]), index == promoted)
                if promoted is None:
                    break
                champion, theirs = champion + float(gains[promoted]), ours[promoted]
                night += promoted + 1

    def _solved(self, rng: np.random.Generator, success: Floats, difficulty: Floats, conduct: Floats) -> Counts:
        """Successes of each policy on each problem, of SAMPLES: [policies, groups, problems]."""
        levels = np.array([self.world.level_for(round(float(one), 6)) for one in success])[:, None, None]
        chances = expit((levels + difficulty + conduct).astype(np.float32))
        solved = np.zeros(chances.shape, dtype=np.int8)
        for _ in range(SAMPLES):
            solved += rng.random(chances.shape, dtype=np.float32) < chances
        return solved

    def _first_promoted(self, ours: Counts, theirs: Counts, alphas: Sequence[float]) -> int | None:
        """The first night of a block whose challenger passes."""
        groups, champion = self.world.groups(), _successes(theirs)
        for index in np.flatnonzero(self.could_pass(ours, theirs, alphas)):
            if self.decide(_successes(ours[index]), champion, groups, alphas[index]):
                return int(index)
        return None

    def could_pass(self, ours: Counts, theirs: Counts, alphas: Sequence[float]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether the mean gain, with the margin where there is one, is large enough to be looked at more closely."""
        by_group = (ours.mean(axis=2) - theirs.mean(axis=1)) / SAMPLES
        error = by_group.std(axis=1, ddof=1) / np.sqrt(by_group.shape[1])
        margin = MARGIN if self.decide is is_no_worse else 0.0
        return np.asarray(by_group.mean(axis=1) + margin > SCREEN * -ndtri(alphas) * error)


def _successes(solved: Counts) -> Success:
    return as_success(np.arange(SAMPLES) < solved.reshape(-1, 1))


def is_better(ours: Success, theirs: Success, groups: dict[str, str], alpha: float) -> bool:
    """promote's check at the error that the decision may spend; its test alone comes first, which is quick."""
    if compare_success(ours, theirs, groups, confidence=1 - 2 * alpha)["p_greater"] > alpha:
        return False
    sides = Sides(episodes(ours, groups), episodes(theirs, groups))
    return check_better(demo_policy(), sides, None, "the champion", alpha=alpha).passed


def is_no_worse(ours: Success, theirs: Success, groups: dict[str, str], alpha: float) -> bool:
    """promote's check of the other way, of a challenger that makes half the calls."""
    if non_inferiority_p_value(ours, theirs, groups, margin=MARGIN) > alpha:
        return False
    sides = Sides(episodes(ours, groups), episodes(theirs, groups, calls=2))
    options = CheaperSettings(measure="calls", max_success_loss=MARGIN, min_saving=0.1)
    return check_cheaper(options, sides, None, alpha=alpha, other_name="the champion").passed


@lru_cache
def demo_policy() -> PolicySettings:
    options = demo_params()["promote"]
    return PolicySettings.model_validate({name: options[name] for name in PolicySettings.model_fields})


@lru_cache
def alphas_of(decisions_per_year: int | None = None) -> tuple[float, ...]:
    """What each decision of a first year, evenly spread, may spend: a decision per night as in params.yaml, or so many.

    Nothing a decision finds changes what the next one gets, so that all years have the same.
    """
    promote = demo_params()["promote"]
    options = ErrorBudgetSettings.model_validate(promote["error_budget"])
    if decisions_per_year is not None:
        options = options.model_copy(update={"decisions_per_year": decisions_per_year})
    spendings: list[Spending] = []
    for number in range(decisions_per_year or NUM_NIGHTS):
        at = FIRST_NIGHT + timedelta(days=365 * number / (decisions_per_year or NUM_NIGHTS))
        budget = error_budget(options, spendings, at=at, most=(1 - promote["confidence"]) / 2)
        spendings.append(Spending(at, budget.alpha))
    return tuple(spending.alpha for spending in spendings)


def wrong_champions(year: Year, num_trials: int, seed: int, *, wrong: float = 0.0) -> list[float]:
    """Per year: whether even one challenger was promoted whose true gain is `wrong` or less."""
    rng = np.random.default_rng(seed)
    return [float(any(night.promoted and night.gain <= wrong for night in year.play(rng))) for _ in range(num_trials)]


def found(gain: float, alpha: float, num_trials: int, seed: int, *, world: World = DEMO) -> list[float]:
    """Per night of its own: whether a challenger that is truly so much better is promoted."""
    rng = np.random.default_rng(seed)
    year = Year((gain,), (1.0,), None, (alpha,), is_better, world=world)
    return [float(next(year.play(rng)).promoted) for _ in range(num_trials)]


EQUAL, MIXED = ((0.0,), (1.0,)), ((0.03, 0.0, -0.01), (1 / 30, 0.5, 1 - 0.5 - 1 / 30))


def simulate_equal_year(num_trials: int, seed: int) -> list[float]:
    return wrong_champions(Year(*EQUAL, None, alphas_of(), is_better), num_trials, seed)


def simulate_equal_year_with_rotation(num_trials: int, seed: int) -> list[float]:
    return wrong_champions(Year(*EQUAL, 10, alphas_of(), is_better), num_trials, seed)


def simulate_worse_year_with_rotation(num_trials: int, seed: int) -> list[float]:
    return wrong_champions(Year((-0.005,), (1.0,), 10, alphas_of(), is_better), num_trials, seed)


def simulate_mixed_year(num_trials: int, seed: int) -> list[float]:
    return wrong_champions(Year(*MIXED, None, alphas_of(), is_better, success=0.8), num_trials, seed)


def simulate_mixed_year_with_rotation(num_trials: int, seed: int) -> list[float]:
    return wrong_champions(Year(*MIXED, 10, alphas_of(), is_better, success=0.8), num_trials, seed)


def simulate_cheaper_year_with_rotation(num_trials: int, seed: int) -> list[float]:
    year = Year((-MARGIN,), (1.0,), 10, alphas_of(), is_no_worse)
    return wrong_champions(year, num_trials, seed, wrong=-MARGIN)


def simulate_better_by_3_found_tonight(num_trials: int, seed: int) -> list[float]:
    return found(0.03, alphas_of()[0], num_trials, seed)


def simulate_better_by_5_found_tonight(num_trials: int, seed: int) -> list[float]:
    return found(0.05, alphas_of()[0], num_trials, seed)


def simulate_better_by_3_found_this_week(num_trials: int, seed: int) -> list[float]:
    return found(0.03, alphas_of(52)[0], num_trials, seed)


def simulate_better_by_3_found_on_ten_times_the_groups(num_trials: int, seed: int) -> list[float]:
    return found(0.03, alphas_of()[0], num_trials, seed, world=LARGE)


def simulate_better_by_3_found_within_30_nights(num_trials: int, seed: int) -> list[float]:
    """Another challenger per night, each three points better than the champion, on test sets of ten nights each."""
    rng = np.random.default_rng(seed)
    year = Year((0.03,), (1.0,), 10, alphas_of()[:30], is_better)
    return [float(any(night.promoted for night in year.play(rng))) for _ in range(num_trials)]


YEAR = "a year of nights makes a champion that is no better: {}"
FOUND = "550 problems × 2 at 90%: {} is promoted"
# `before` is the same simulation with the intervals and tests of commit 7601ae5 at 95%, 200 trials each. A power (no
# stated value) has a bound at `least`, near what it is today.
RATES = (
    Rate(YEAR.format("equal challengers, one test set"), simulate_equal_year, 500, 0.1, "most", 0.595, 0.02),
    Rate(YEAR.format("equal, a test set per 10 nights"),
         simulate_equal_year_with_rotation, 500, 0.1, "most", 1.0, 0.04),
    Rate(YEAR.format("0.5 points worse, a test set per 10"),
         simulate_worse_year_with_rotation, 400, 0.1, "most", 0.955, 0.02),
    Rate(YEAR.format("better, equal and worse mixed"), simulate_mixed_year, 400, 0.1, "most", 0.39, 0.02),
    Rate(YEAR.format("mixed, a test set per 10 nights"),
         simulate_mixed_year_with_rotation, 400, 0.1, "most", 0.995, 0.02),
    Rate("a year of cheaper challengers, worse by the whole margin: one is promoted as good",
         simulate_cheaper_year_with_rotation, 400, 0.1, "most", 1.0, 0.03),
    Rate(FOUND.format("3 points better, nightly decisions,"),
         simulate_better_by_3_found_tonight, 500, None, "least", 0.66, 0.06),
    Rate(FOUND.format("5 points better, nightly decisions,"),
         simulate_better_by_5_found_tonight, 300, None, "least", 0.995, 0.5),
    Rate(FOUND.format("3 points better, weekly decisions,"),
         simulate_better_by_3_found_this_week, 500, None, "least", 0.66, 0.2),
    Rate(FOUND.format("3 points better on each of 30 nights, one"),
         simulate_better_by_3_found_within_30_nights, 200, None, "least", 1.0, 0.6),
    Rate("5,500 problems of ten times the groups: 3 points better, nightly decisions, is promoted",
         simulate_better_by_3_found_on_ten_times_the_groups, 40, None, "least", 1.0, 0.98),
)  # fmt: skip
