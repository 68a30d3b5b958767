"""The promotion policy: each check on numbers a person can verify, and what no improvement may ever do."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from tasks.measurement.promotion_policy import (
    Check,
    PolicyOptions,
    Verdict,
    check_better,
    judge,
    verdict_of,
)
from tasks.measurement.savings import saving
from tasks.measurement.significance import holm
from tasks.measurement.statistics import paired_difference
from tasks.records import Trajectory
from tests.measurement.synthetic import trajectory

LENIENT: dict[str, Any] = {
    "minimum_success": 0.0,
    "confidence": 0.95,
    "or_cheaper": None,
    "max_invalid_call_share": 1.0,
    "max_overlong_share": 1.0,
}
CHEAPER = {"measure": "sampled_tokens", "max_success_loss": 0.05, "min_saving": 0.1}


def policy(**changed: Any) -> PolicyOptions:
    return PolicyOptions.model_validate({**LENIENT, **changed})


def episodes(outcomes: Sequence[bool | str], *, category: str = "book", tokens: int = 3) -> list[Trajectory]:
    """One episode a problem; a word is an outcome of its own, and `tokens` how many it samples."""
    return [
        replace(
            trajectory(
                f"{category}{number}",
                outcome is True,
                category=category,
                outcome=outcome if isinstance(outcome, str) else None,
            ),
            token_ids=[1] * tokens,
            sampled_mask=[True] * tokens,
            sampler_logp=[-0.1] * tokens,
        )
        for number, outcome in enumerate(outcomes)
    ]


def decided(
    options: PolicyOptions, ours: list[Trajectory], theirs: list[Trajectory]
) -> tuple[Verdict, dict[str, Check]]:
    checks = judge(
        options,
        ours,
        theirs,
        alpha=(1 - options.confidence) / 2,
        anchor=None,
        snapshot="step-0010",
        other_name="the champion, version 3",
    )
    return verdict_of(checks), {check.name: check for check in checks}


def of(num_successes: int, num: int = 100, **more: Any) -> list[Trajectory]:
    return episodes([number < num_successes for number in range(num)], **more)


def test_nine_problems_gained_and_none_lost_is_better_and_promotes():
    verdict, checks = decided(policy(), of(59), of(50))
    assert verdict == "promote"
    assert checks["better"].numbers["p_value"] == pytest.approx(2 / 2**9, abs=1e-6)  # McNemar: all nine fell our way
    assert checks["better"].numbers["ci_low"] > 0
    assert checks["better"].sentence == (
        "Against the champion, version 3 (50.0%) that is +9.0%, 95% interval +4.8% to +16.2%, p = 0.004: better."
    )


def test_five_problems_gained_are_no_evidence_and_hold():
    verdict, checks = decided(policy(), of(55), of(50))  # two-sided p = 2/2⁵ = 0.0625
    assert verdict == "hold"
    assert not checks["better"].passed and not checks["better"].speaks_against
    assert "p = 0.062: no clear difference" in checks["better"].sentence


def test_nine_problems_lost_and_none_gained_reject():
    verdict, checks = decided(policy(), of(50), of(59))
    assert verdict == "reject"
    assert checks["better"].speaks_against


def test_success_below_the_minimum_rejects_however_much_better():
    verdict, checks = decided(policy(minimum_success=0.6), of(59), of(10))
    assert verdict == "reject"
    assert checks["better"].passed
    assert checks["minimum_success"].sentence == (
        "step-0010 succeeds on 59.0% of test, below promote.minimum_success (60.0%)."
    )
    assert decided(policy(minimum_success=0.59), of(59), of(10))[0] == "promote"


def test_as_good_and_a_third_cheaper_promotes_where_the_policy_allows_it():
    ours, theirs = of(900, 1000, tokens=20), of(900, 1000, tokens=30)
    assert decided(policy(), ours, theirs)[0] == "hold"
    verdict, checks = decided(policy(or_cheaper=CHEAPER), ours, theirs)
    assert verdict == "promote"
    assert checks["cheaper"].numbers["saving"] == pytest.approx(1 / 3, abs=1e-6)
    assert checks["cheaper"].sentence == (
        "20.0 sampled tokens an episode instead of 30.0 is -33.3%, 95% interval -33.3% to -33.3%: evidence of saving "
        "more than 10.0%, evidence of losing less than 5.0% of success."
    )


@pytest.mark.parametrize(("tokens", "num_lost"), [(28, 0), (20, 60)])
def test_neither_a_small_saving_nor_one_that_costs_too_much_success_is_enough(tokens: int, num_lost: int):
    """28 of 30 tokens is 6.7% saved, of more than 10% asked; 60 of 1000 lost is 6 points, of at most 5."""
    verdict, checks = decided(
        policy(or_cheaper=CHEAPER), of(900 - num_lost, 1000, tokens=tokens), of(900, 1000, tokens=30)
    )
    assert not checks["cheaper"].passed
    assert verdict == ("reject" if num_lost else "hold")


def test_worse_but_cheaper_and_perhaps_within_the_margin_is_held_and_not_rejected():
    """20 of 1000 lost is worse with evidence (p = 2/2²⁰); the interval may still reach the margin of 2.5 points."""
    options = policy(or_cheaper={**CHEAPER, "max_success_loss": 0.025})
    verdict, checks = decided(options, of(880, 1000, tokens=20), of(900, 1000, tokens=30))
    assert checks["better"].numbers["ci_high"] < 0
    assert checks["better"].numbers["ci_low"] < -0.025
    assert verdict == "hold"


def test_a_category_that_falls_rejects_a_challenger_that_gains_on_the_whole():
    ours = of(90, category="book") + of(30, 50, category="cancel")
    theirs = of(20, category="book") + of(45, 50, category="cancel")
    verdict, checks = decided(policy(), ours, theirs)
    assert checks["better"].passed
    assert verdict == "reject"
    assert checks["categories"].numbers["falling"] == ["cancel"]
    assert checks["categories"].sentence == (
        "1 category falls with evidence (Holm over 2): cancel 90.0% → 60.0%, p < 0.001."
    )


def test_one_category_of_ten_that_falls_by_luck_is_no_evidence():
    """7 lost of 50: p = 2/2⁷ = 0.0156 alone, ten times that among ten."""
    rising = [(of(50, 50, category=f"c{n}"), of(30, 50, category=f"c{n}")) for n in range(9)]
    ours = [item for side, _ in rising for item in side] + of(43, 50, category="quote")
    theirs = [item for _, side in rising for item in side] + of(50, 50, category="quote")
    verdict, checks = decided(policy(), ours, theirs)
    assert verdict == "promote"
    assert checks["categories"].numbers["by_category"]["quote"]["p_value"] == 0.015625
    assert checks["categories"].numbers["by_category"]["quote"]["p_of_fall"] == 0.15625
    assert checks["categories"].numbers["confidence"] == 0.995  # Bonferroni's 1 − 0.05/10 for the intervals shown


def test_holm_multiplies_the_smallest_by_all_and_never_falls_below_the_one_before():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})  # 4·0.005, 3·0.01, 2·0.03, 1·0.04
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_too_many_invalid_calls_or_overlong_episodes_reject():
    invalid = [replace(item, num_calls=10, num_invalid_calls=1) for item in of(90)]
    verdict, checks = decided(policy(max_invalid_call_share=0.05), invalid, of(10))
    assert verdict == "reject"
    assert checks["categories"].sentence == "All problems are of one category, so none falls by itself."
    assert checks["invalid_call_share"].sentence == (
        "10.0% of its calls are invalid, above promote.max_invalid_call_share (5.0%)."
    )
    overlong = episodes([True] * 90 + ["overlong"] * 10)
    assert decided(policy(max_overlong_share=0.09), overlong, of(10))[0] == "reject"
    assert decided(policy(max_overlong_share=0.1), overlong, of(10))[0] == "promote"


def test_a_saving_is_the_ratio_of_means_with_the_interval_of_its_residuals():
    """Costs 2, 6 against 5, 11: R = 8/16 = ½, residuals −½ and ½, s² = ½, standard error √(½/2)/8 = 1/16."""
    ours = episodes([True], tokens=2) + episodes([True], category="b", tokens=6)
    theirs = episodes([True], tokens=5) + episodes([True], category="b", tokens=11)
    saved = saving(ours, theirs, lambda item: item.num_sampled_tokens, confidence=0.5)
    assert saved is not None
    assert (saved["challenger"], saved["other"], saved["saving"]) == (4.0, 8.0, 0.5)
    assert saved["ci_low"] == pytest.approx(0.5 - student.ppf(0.75, 1) / 16, abs=1e-6)  # t of one degree: 1.0
    assert math.isclose(saved["ci_high"] - 0.5, 0.5 - saved["ci_low"], abs_tol=2e-6)


def test_one_problem_or_a_policy_that_calls_nothing_shows_no_saving():
    one, other = of(1, 1, tokens=2), of(1, 1, tokens=9)
    assert saving(one, other, lambda item: item.num_sampled_tokens, confidence=0.95) is None
    assert saving(of(2, 2), of(2, 2), lambda item: 0, confidence=0.95) is None
    verdict, checks = decided(policy(or_cheaper=CHEAPER), one, other)
    assert verdict == "hold"
    assert checks["cheaper"].sentence.startswith("Too few problems to compare sampled tokens an episode:")


def test_episodes_the_environment_broke_speak_for_nobody():
    ours = of(59) + episodes(["environment_error"] * 5, category="rare")
    theirs = of(50) + episodes([True] * 5, category="rare")
    verdict, checks = decided(policy(), ours, theirs)
    assert verdict == "promote"
    assert checks["categories"].sentence == "All problems are of one category, so none falls by itself."


def test_a_check_is_plain_json():
    checks = decided(policy(or_cheaper=CHEAPER), of(59), of(50))[1]
    row = checks["minimum_success"].to_row()
    assert row == {
        "name": "minimum_success",
        "passed": True,
        "speaks_against": False,
        "sentence": checks["minimum_success"].sentence,
        "numbers": {"success_rate": 0.59, "minimum_success": 0.0},
    }


OUTCOMES = st.sampled_from(["success", "failure", "overlong"])


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[PolicyOptions, list[Trajectory], list[Trajectory], list[Trajectory]]:
    """A policy, a challenger, the same challenger with some failed episodes succeeding instead, and its rival."""
    num_problems, num_samples = draw(st.integers(4, 24)), draw(st.integers(1, 3))
    keys = [(problem, sample) for problem in range(num_problems) for sample in range(num_samples)]
    tokens = draw(st.sampled_from([(3, 3), (2, 4), (4, 2)]))
    leaning = draw(st.sampled_from([OUTCOMES, st.sampled_from(["success", "success", "success", "failure"])]))

    def play(outcomes: Sequence[str], num_tokens: int) -> list[Trajectory]:
        return [
            replace(
                trajectory(
                    f"p{problem}", outcome == "success", category=f"c{problem % 3}", sample_index=k, outcome=outcome
                ),
                sampled_mask=[True] * num_tokens,
            )
            for (problem, k), outcome in zip(keys, outcomes, strict=True)
        ]

    ours = draw(st.lists(leaning, min_size=len(keys), max_size=len(keys)))
    theirs = draw(st.lists(OUTCOMES, min_size=len(keys), max_size=len(keys)))
    gains = draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    better = ["success" if gain else outcome for gain, outcome in zip(gains, ours, strict=True)]
    options = policy(
        minimum_success=draw(st.sampled_from([0.0, 0.4])),
        confidence=draw(st.sampled_from([0.6, 0.8, 0.95])),
        or_cheaper=draw(st.sampled_from([None, {**CHEAPER, "max_success_loss": 0.4, "min_saving": 0.0}])),
        max_overlong_share=draw(st.sampled_from([0.2, 1.0])),
    )
    return options, play(ours, tokens[0]), play(better, tokens[0]), play(theirs, tokens[1])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(comparisons())
def test_a_challenger_that_gets_better_never_turns_promote_into_reject(
    case: tuple[PolicyOptions, list[Trajectory], list[Trajectory], list[Trajectory]],
):
    options, before, after, other = case
    assert (decided(options, before, other)[0], decided(options, after, other)[0]) != ("promote", "reject")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(comparisons())
def test_no_check_starts_to_speak_against_a_challenger_that_got_better(
    case: tuple[PolicyOptions, list[Trajectory], list[Trajectory], list[Trajectory]],
):
    options, before, after, other = case
    against_before, against_after = (
        {name for name, check in decided(options, side, other)[1].items() if check.speaks_against}
        for side in (before, after)
    )
    assert against_after <= against_before


@settings(max_examples=30, deadline=None, derandomize=True)
@given(comparisons())
def test_a_policy_judged_against_itself_is_never_promoted_for_being_better(
    case: tuple[PolicyOptions, list[Trajectory], list[Trajectory], list[Trajectory]],
):
    options, challenger, _, _ = case
    checks = decided(options, challenger, challenger)[1]
    assert not checks["better"].passed and not checks["better"].speaks_against
    assert checks["categories"].passed


@pytest.mark.slow
def test_the_best_of_sixteen_equal_snapshots_passes_where_it_was_chosen_and_not_on_fresh_problems():
    """The winner's curse, 100 times: all sixteen are as good as the champion, so every promotion is a false one.

    Judged where it was chosen, the best of sixteen is promoted far more often than the 2.5% that one side of a 95%
    interval allows; judged on `test`, which had no part in the choice, it stays within that.
    """
    rng = random.Random(0)

    def play(chances: list[float]) -> list[bool]:
        return [rng.random() < chance for chance in chances]

    def is_better(ours: list[bool], theirs: list[bool]) -> bool:
        sides = [[trajectory(f"p{n}", success) for n, success in enumerate(side)] for side in (ours, theirs)]
        return check_better(
            policy(), paired_difference(*sides, confidence=0.95), None, "the champion", alpha=0.025
        ).passed

    promoted = {"select": 0, "test": 0}
    for _ in range(100):
        select, test = ([rng.random() for _ in range(100)] for _ in range(2))
        best = max((play(select) for _ in range(16)), key=sum)
        promoted["select"] += is_better(best, play(select))
        promoted["test"] += is_better(play(test), play(test))
    assert promoted["select"] > 10
    assert promoted["test"] <= 3
