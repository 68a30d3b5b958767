"""p-values a person can count out, and what a comparison can see at all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tasks.measurement import significance
from tasks.measurement.intervals import paired_interval
from tasks.measurement.power import minimum_detectable_difference
from tasks.measurement.significance import (
    family_level,
    mcnemar_p_value,
    possible_p_values,
    sign_flip_p_values,
    smallest_p_value,
)
from tasks.measurement.statistics import paired_difference
from tests.measurement.test_statistics import episodes


def test_signs_of_three_differences_fall_in_eight_ways():
    # ±2 ±1 ±1 reaches 4 in one way, 2 in two: |sum| ≥ 2 in 2·(1 + 2) of 8 ways, sum ≥ 2 in 3, sum ≥ −2 in 7.
    assert sign_flip_p_values([2, 1, -1]).two_sided == pytest.approx(6 / 8)
    assert sign_flip_p_values([2, 1, -1]).greater == pytest.approx(3 / 8)
    assert sign_flip_p_values([-2, 1, -1]).greater == pytest.approx(7 / 8)
    assert sign_flip_p_values([2, 1, 1]).two_sided == pytest.approx(2 / 8)
    assert sign_flip_p_values([200, 100, 100]).two_sided == pytest.approx(2 / 8)  # the unit says nothing


def test_both_alternatives_come_from_one_distribution():
    assert sign_flip_p_values([2, 1, 1]) == pytest.approx((2 / 8, 1 / 8))
    assert sign_flip_p_values([-2, -1, -1]) == pytest.approx((2 / 8, 1.0))


def test_few_groups_never_reach_a_small_level():
    """Five groups that all gain: one way of 2⁵ for the signs to fall."""
    assert smallest_p_value(5) == sign_flip_p_values([1] * 5).greater == 1 / 32
    five, six = (
        minimum_detectable_difference(
            num_problems=500, samples_per_problem=8, confidence=0.95, power=0.8, num_groups=num_groups
        )
        for num_groups in (5, 6)
    )
    assert five == 1.0 and six < 1.0  # 1/64 is below 2.5%


def test_problems_without_a_difference_say_nothing():
    assert sign_flip_p_values([2, 1, -1] + [0] * 500) == sign_flip_p_values([2, 1, -1])
    assert sign_flip_p_values([0] * 500) == (1.0, 1.0)
    assert mcnemar_p_value(0, 0) == 1.0


def test_at_one_sample_a_problem_the_test_is_mcnemars():
    # 8 gained, 1 lost: 2·(C(9,8) + C(9,9)) / 2⁹ = 20 / 512.
    assert mcnemar_p_value(8, 1) == pytest.approx(20 / 512)
    assert sign_flip_p_values([1] * 8 + [-1]).two_sided == pytest.approx(20 / 512)
    ours, theirs = {f"p{i}": [i < 8] for i in range(9)}, {f"p{i}": [i == 8] for i in range(9)}
    single = paired_difference(episodes(ours), episodes(theirs), confidence=0.95)
    assert single["test"] == "mcnemar" and single["p_value"] == pytest.approx(20 / 512, abs=1e-7)
    twice = paired_difference(
        episodes({key: 2 * value for key, value in ours.items()}),
        episodes({key: 2 * value for key, value in theirs.items()}),
        confidence=0.95,
    )
    assert twice["test"] == "sign_flip" and twice["p_value"] == pytest.approx(20 / 512, abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_scipy_which_goes_through_all_signs(seed: int):
    from scipy.stats import permutation_test

    steps = np.random.default_rng(seed).integers(-4, 6, size=12)
    ours = sign_flip_p_values(steps.tolist())
    for alternative, found in (("two-sided", ours.two_sided), ("greater", ours.greater)):
        reference = permutation_test(
            (steps.astype(float),), np.sum, permutation_type="samples", alternative=alternative, n_resamples=2**12
        )
        assert found == pytest.approx(reference.pvalue, abs=1e-12)


@pytest.mark.slow
def test_long_distributions_and_discordant_pairs_are_scipys(monkeypatch: pytest.MonkeyPatch):
    from scipy.stats import binomtest

    for num_gained, num_lost in itertools.product(range(25), repeat=2):
        if num_gained + num_lost:
            expected = binomtest(num_gained, num_gained + num_lost).pvalue
            assert mcnemar_p_value(num_gained, num_lost) == pytest.approx(expected, rel=1e-12)
    assert mcnemar_p_value(0, 0) == 1.0
    steps = np.random.default_rng(1).integers(-9, 12, size=400).tolist()
    by_term = sign_flip_p_values(steps).two_sided
    monkeypatch.setattr(significance, "MOST_PRODUCTS", 0)
    assert sign_flip_p_values(steps).two_sided == pytest.approx(by_term, abs=1e-13)


def test_where_the_grid_is_too_fine_signs_are_drawn_and_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch):
    differences = np.random.default_rng(3).integers(-4, 6, size=60).tolist()
    exact = sign_flip_p_values(differences).two_sided
    monkeypatch.setattr(significance, "FINEST_GRID", 10)
    drawn = [sign_flip_p_values(differences).two_sided for _ in range(2)]
    assert drawn[0] == drawn[1] == pytest.approx(exact, abs=4 * math.sqrt(exact / significance.NUM_RESAMPLES))


def test_a_difference_beyond_doubt_still_has_a_p_value_above_zero():
    sure = paired_difference(
        episodes({f"p{i}": [True] for i in range(60)}), episodes({f"p{i}": [False] for i in range(60)}), confidence=0.95
    )
    assert sure["p_value"] == pytest.approx(2 / 2**60, rel=1e-5)


def test_a_family_of_discrete_tests_takes_no_more_error_than_it_can_use():
    """Three problems that differ give 1/8, 1/2 … at the least, ten give 1/1024, 11/1024, 56/1024, 176/1024."""
    few, many = possible_p_values([1, 1, -1, 0]), possible_p_values([2] * 10)  # whatever the unit
    assert few == [1 / 8]
    assert many == pytest.approx([1 / 1024, 11 / 1024, 56 / 1024, 176 / 1024, 386 / 1024], rel=1e-5)
    assert family_level([few, few, many], 0.1) == pytest.approx(56 / 1024, rel=1e-5)  # few cannot raise an alarm
    assert family_level([many, many], 0.1) == 0.05  # two times 56/1024 is more than 0.1: Bonferroni's is left
    assert family_level([few, many], 0.2) == 0.125  # 1/8 + 56/1024 = 0.18
    assert family_level([[], []], 0.1) == 0.05
    assert possible_p_values([2] * 10, above=1.2) == pytest.approx(
        [1 / 1024, 11 / 1024], rel=1e-5
    )  # means of 2.0 and 1.6


def test_what_can_be_detected_shrinks_with_problems_and_samples():
    # One sample of 500 problems: variance ½·(¼ + ½) = 0.375; (500·0.375 + 1)/502² is 0.02735²; t adds up to 2.8070.
    seen = minimum_detectable_difference(num_problems=500, samples_per_problem=1, confidence=0.95, power=0.8)
    assert seen == pytest.approx(2.8070 * 0.027353 * 502 / 500, abs=1e-4)
    more = minimum_detectable_difference(num_problems=2000, samples_per_problem=1, confidence=0.95, power=0.8)
    assert more == pytest.approx(seen / 2, rel=0.01)
    sampled = minimum_detectable_difference(num_problems=500, samples_per_problem=8, confidence=0.95, power=0.8)
    assert seen * math.sqrt((0.25 + 0.5 / 8) / 0.75) == pytest.approx(sampled, rel=0.01)
    assert minimum_detectable_difference(num_problems=2, samples_per_problem=1, confidence=0.95, power=0.8) == 1.0
    with pytest.raises(ValueError, match="0 problems with 1 samples each measure nothing"):
        minimum_detectable_difference(num_problems=0, samples_per_problem=1, confidence=0.95, power=0.8)


@pytest.mark.slow
@pytest.mark.parametrize(("num_problems", "num_samples", "rate"), [(100, 1, 0.5), (400, 4, 0.5), (400, 2, 0.9)])
def test_a_gain_of_the_detectable_size_is_found_as_often_as_stated(num_problems: int, num_samples: int, rate: float):
    """Chances of a problem as the formula assumes them: half of the variance between problems, half of that shared."""
    gain = minimum_detectable_difference(
        num_problems=num_problems, samples_per_problem=num_samples, confidence=0.95, power=0.8, success_rate=rate
    )
    rng, num_trials = np.random.default_rng(0), 600  # standard error: 1.6 points
    found = 0
    for _ in range(num_trials):
        ours, theirs = correlated_chances(rng, num_problems, rate + gain / 2, rate - gain / 2)
        difference = (rng.binomial(num_samples, ours) - rng.binomial(num_samples, theirs)) / num_samples
        found += paired_interval(difference.tolist(), range(len(difference)), confidence=0.95)[0] > 0
    assert 0.74 <= found / num_trials <= 0.86


def correlated_chances(
    rng: np.random.Generator, num_problems: int, ours: float, theirs: float
) -> tuple[np.ndarray, np.ndarray]:
    """Chances with variance p(1−p)/2 in each policy: betas of strength 1, drawn from one rank for half the problems."""
    from scipy.special import betaincinv

    mine, yours = rng.random((2, num_problems))
    yours = np.where(rng.random(num_problems) < 0.5, mine, yours)
    return betaincinv(ours, 1 - ours, mine), betaincinv(theirs, 1 - theirs, yours)
