"""Numbers a person can check by hand; what intervals promise is simulated in tests/simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.core.records import Trajectory
from tasks.measurement.intervals import clustered_interval
from tasks.measurement.statistics import (
    compare_success,
    groups_by_problem,
    non_inferiority_p_value,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    success_rate,
    summarise,
)
from tests.measurement.synthetic import trajectory


def episodes(success_by_problem: dict[str, list[bool]]) -> list[Trajectory]:
    return [
        trajectory(problem, success, sample_index=index)
        for problem, successes in success_by_problem.items()
        for index, success in enumerate(successes)
    ]


def test_one_sample_a_problem_gives_wilsons_interval():
    # 8 of 10 at 95%, z = 1.96: (0.8 + 0.1921 ± 1.96·√(0.016 + 0.0096)) / 1.3842 = 0.716738 ± 0.226577.
    assert clustered_interval([1.0] * 8 + [0.0] * 2, range(10), confidence=0.95) == pytest.approx(
        (0.490162, 0.943318), abs=1e-6
    )


def test_no_success_in_500_leaves_room_above_and_500_of_500_leaves_room_below():
    # Wilson at p = 0: (0, z²/(n + z²)) = 3.8415/503.8415 = 0.007624.
    assert clustered_interval([0.0] * 500, range(500), confidence=0.95) == pytest.approx((0.0, 0.007624), abs=1e-6)
    assert clustered_interval([1.0] * 500, range(500), confidence=0.95) == pytest.approx((1 - 0.007624, 1.0), abs=1e-6)


def test_four_equal_samples_of_a_problem_are_worth_one():
    means = [1.0] * 60 + [0.0] * 40  # each problem solved in all of its samples, or in none
    once = clustered_interval(means, range(100), confidence=0.95, num_episodes=100)
    four_times = clustered_interval(means, range(100), confidence=0.95, num_episodes=400)
    assert four_times == once


def test_problems_that_differ_little_make_extra_samples_count_but_never_as_more_than_they_are():
    means = [0.5, 0.75] * 50
    told = clustered_interval(means, range(100), confidence=0.95, num_episodes=400)
    # s² = 0.0158 would be worth 1484 samples at p = 0.625; only 400 were taken: Wilson's at 400 is 0.6238 ± 0.0472.
    assert told == pytest.approx((0.576554, 0.671067), abs=1e-4)


def test_problems_without_any_spread_count_once_each():
    # All means 0.5 shows no spread at all, which three problems can do by luck: Wilson's at n = 3 is 0.5 ± 0.375.
    assert clustered_interval([0.5, 0.5, 0.5], range(3), confidence=0.95) == pytest.approx((0.125, 0.875), abs=0.001)


def test_a_surer_interval_is_wider():
    narrow, wide = (clustered_interval([1.0, 0.0, 1.0], range(3), confidence=confidence) for confidence in (0.8, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.slow
def test_95_percent_intervals_of_one_sample_a_problem_cover_93_to_97_times_in_100_at_every_rate():
    from scipy.stats import binom

    # With one sample the chance of each count is binomial, so coverage is a sum and needs no simulation.
    intervals = [
        clustered_interval([1.0] * wins + [0.0] * (500 - wins), range(500), confidence=0.95) for wins in range(501)
    ]
    for percent in range(1, 100):
        rate = percent / 100
        covering = [wins for wins, (low, high) in enumerate(intervals) if low <= rate <= high]
        assert 0.93 <= binom.pmf(covering, 500, rate).sum() <= 0.97


def test_the_paired_difference_is_the_mean_over_problems_of_the_difference_of_means():
    ours = episodes({"a": [True, True], "b": [True, False], "c": [False, False]})  # 1, ½, 0
    theirs = episodes({"a": [False, False], "b": [True, False], "c": [True, False]})  # 0, ½, ½
    result = paired_difference(ours, theirs, confidence=0.95)
    assert result["difference"] == pytest.approx((1 + 0 - 0.5) / 3, abs=1e-6)
    assert result["num_problems"] == 3


def test_pairing_sees_a_small_gain_that_two_separate_intervals_cannot():
    theirs = {f"p{i}": [i < 100] for i in range(200)}
    ours = {problem: [successes[0] or i < 110] for i, (problem, successes) in enumerate(theirs.items())}
    gain = paired_difference(episodes(ours), episodes(theirs), confidence=0.95)
    apart = [summarise(episodes(side), confidence=0.95) for side in (ours, theirs)]
    assert gain["difference"] == pytest.approx(0.05)  # 10 of 200 problems gained, none lost
    assert gain["ci_low"] > 0
    assert apart[0]["ci_low"] < apart[1]["ci_high"]


def test_equal_policies_differ_by_0_with_an_interval_that_is_not_a_point():
    same = episodes({f"p{i}": [False] for i in range(500)})
    # Tango's interval where no pair differs is ±z²/(n + z²) = 3.8415/503.8415.
    assert paired_difference(same, same, confidence=0.95) == {
        "difference": 0.0,
        "ci_low": pytest.approx(-0.007624, abs=1e-6),
        "ci_high": pytest.approx(0.007624, abs=1e-6),
        "num_problems": 500,
        "num_groups": 500,
        "p_value": 1.0,
        "p_greater": 1.0,
        "test": "mcnemar",
    }


def test_problems_of_one_split_group_count_as_one_fact():
    """Ten problems gained in each of 2 groups of 10, none in 3 others: as sure as 2 of 5 facts, not 20 of 50."""
    theirs = {f"p{i}": [False] for i in range(50)}
    ours = {f"p{i}": [i < 20] for i in range(50)}
    groups = {f"p{i}": f"g{i // 10}" for i in range(50)}
    together = compare_success(ours, theirs, groups, confidence=0.95)
    apart = compare_success(ours, theirs, {problem: problem for problem in groups}, confidence=0.95)
    assert (together["num_groups"], apart["num_groups"], together["difference"]) == (5, 50, apart["difference"])
    assert together["p_value"] == 0.5 and apart["p_value"] == pytest.approx(2 / 2**20, rel=1e-4)  # two coins, twenty
    assert (together["p_greater"], together["test"]) == (0.25, "sign_flip")
    assert together["ci_low"] < 0 < apart["ci_low"] and together["ci_high"] > apart["ci_high"]
    assert non_inferiority_p_value(ours, theirs, groups, margin=0.1) > non_inferiority_p_value(
        ours, theirs, {problem: problem for problem in groups}, margin=0.1
    )


def test_trajectories_name_their_split_group_and_those_that_do_not_are_groups_of_their_own():
    grouped = [replace(item, split_group="route") for item in episodes({"a": [True], "b": [True], "c": [False]})]
    assert groups_by_problem(grouped) == dict.fromkeys("abc", "route")
    assert groups_by_problem(episodes({"a": [True], "b": [True]})) == {"a": "a", "b": "b"}
    alone = [replace(item, split_group="") for item in grouped]
    assert summarise(grouped, confidence=0.95)["ci_low"] < summarise(alone, confidence=0.95)["ci_low"]


def test_all_gained_stays_within_what_a_difference_can_be():
    won, lost = ({f"p{i}": [value] for i in range(500)} for value in (True, False))
    gain = paired_difference(episodes(won), episodes(lost), confidence=0.95)
    assert gain["difference"] == 1.0
    assert 0.98 < gain["ci_low"] < gain["ci_high"] == 1.0


def test_policies_measured_on_other_problems_are_not_compared():
    with pytest.raises(ValueError, match=r"2 problems \(such as 'b'\) .* Measure both policies on the same problems"):
        paired_difference(episodes({"a": [True], "b": [True]}), episodes({"a": [True], "c": [True]}), confidence=0.95)


def test_a_problem_one_side_lost_to_our_own_fault_is_left_out_of_the_pairs():
    ours = [*episodes({"a": [True]}), trajectory("b", False, outcome="environment_error")]
    result = paired_difference(ours, episodes({"a": [False], "b": [True]}), confidence=0.95)
    assert (result["difference"], result["num_problems"]) == (1.0, 1)


def test_pass_at_k_and_pass_hat_k_count_the_ways_to_draw():
    # 2 successes of 4, drawn 2 at a time: 6 ways, 1 of them without a success, 1 of them with both.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_hat_k(4, 2, 2) == pytest.approx(1 / 6)
    assert pass_at_k(4, 2, 1) == pass_hat_k(4, 2, 1) == 0.5


def test_the_chance_of_one_sample_is_its_share_to_the_last_bit():
    """1 − 9/10 is less than 1/10 in floating point, so one try would not match the same policy."""
    for num_samples in range(1, 13):
        for num_successes in range(num_samples + 1):
            assert pass_at_k(num_samples, num_successes, 1) == num_successes / num_samples


def test_a_summary_holds_every_number_of_a_small_hand_made_set():
    trajectories = [
        trajectory("a", True, category="book/none", num_calls=4),
        trajectory("a", True, category="book/none", sample_index=1, num_calls=4),
        trajectory("b", False, category="quote/none", num_calls=2, num_invalid_calls=3),
        trajectory("b", True, category="quote/none", sample_index=1, num_calls=2),
        trajectory("c", False, category="quote/none", outcome="max_turns", num_calls=10),
        trajectory("c", False, category="quote/none", sample_index=1, outcome="overlong", num_calls=8),
    ]
    result = summarise(trajectories, confidence=0.95)
    assert result["success_rate"] == 0.5  # (1 + ½ + 0) / 3
    assert (result["num_problems"], result["samples_per_problem"]) == (3, 2)
    assert 0 < result["ci_low"] < 0.5 < result["ci_high"] < 1
    assert {name: row["success_rate"] for name, row in result["by_category"].items()} == {
        "book/none": 1.0,
        "quote/none": 0.25,
    }
    assert result["by_category"]["quote/none"]["num_problems"] == 2
    of_quotes = result["by_category"]["quote/none"]
    assert (of_quotes["pass_at_k"], of_quotes["pass_hat_k"]) == (0.5, 0.0)  # b is solved once of two, c never
    assert (of_quotes["mean_calls"], of_quotes["mean_sampled_tokens"]) == (5.5, 3.0)  # 22 / 4
    assert of_quotes["invalid_call_share"] == pytest.approx(3 / 22, abs=1e-6)
    assert {name: share for name, share in of_quotes["outcomes"].items() if share} == {
        "success": 0.25, "failure": 0.25, "max_turns": 0.25, "overlong": 0.25,
    }  # fmt: skip
    assert result["outcomes"] == {
        "success": 0.5,
        "failure": 0.166667,
        "max_turns": 0.166667,
        "overlong": 0.166667,
        "environment_error": 0.0,
    }
    assert result["mean_sampled_tokens"] == 3.0
    assert result["mean_calls"] == 5.0  # 30 / 6
    assert result["invalid_call_share"] == 0.1  # 3 / 30
    assert result["pass_at_k"] == pytest.approx(2 / 3, abs=1e-6)  # a and b, with k = 2
    assert result["pass_hat_k"] == pytest.approx(1 / 3, abs=1e-6)  # a alone


def test_our_own_faults_count_as_outcomes_and_not_as_failures():
    trajectories = [
        trajectory("a", True),
        trajectory("a", False, sample_index=1, outcome="environment_error"),
        trajectory("b", False, outcome="environment_error"),
        trajectory("b", False, sample_index=1, outcome="environment_error"),
    ]
    result = summarise(trajectories, confidence=0.95)
    assert result["success_rate"] == 1.0
    assert (result["num_problems"], result["samples_per_problem"]) == (1, 2)
    assert (result["outcomes"]["success"], result["outcomes"]["environment_error"]) == (0.25, 0.75)


def test_a_policy_the_environment_never_let_finish_has_no_success_rate():
    with pytest.raises(ValueError, match="1 trajectory, all ended by an environment error"):
        summarise([trajectory(outcome="environment_error")], confidence=0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_outside_0_and_1_is_refused(confidence: float):
    with pytest.raises(ValueError, match="not between 0 and 1"):
        clustered_interval([1.0], range(1), confidence=confidence)


def test_the_success_rate_alone_is_that_of_the_summary():
    """2 of 3 samples of one problem and 0 of 1 of another: (⅔ + 0) / 2."""
    played = episodes({"p0": [True, True, False], "p1": [False]})
    assert success_rate(played) == summarise(played, confidence=0.95)["success_rate"] == 0.333333
    with pytest.raises(ValueError, match="1 trajectory, all ended by an environment error"):
        success_rate([trajectory(outcome="environment_error")])
