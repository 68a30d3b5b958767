"""The posterior of a problem's solve rate, and the share of groups that teach nothing, both checked by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.learning.grpo.signal import ExpectedSignal, expected_signal, share_without_signal
from tasks.learning.grpo.solve_rates import Beta, Played, SolveRates, difficulty, probabilities_between
from tests import tiny
from tests.learning.options import grpo


def a_problem(name: str, category: str = "book", level: int = 3, calls: tuple[str, ...] = ("look",)) -> Problem:
    reference = ReferenceTurn(calls=[ToolCall(name=call, arguments={}) for call in calls], answer="done")
    return Problem(
        id=name, category=category, level=level, requests=["go"], world={}, reference=[reference], split_group=name
    )


def rates(*problems: Problem, **changed: Any) -> SolveRates:
    band = {"prior_strength": 2.0, "half_life": None, **changed}
    return SolveRates(problems, grpo(band={**grpo().band.model_dump(), **band}).band)


def test_a_problem_that_nobody_played_has_the_rate_of_its_category_its_level_and_all() -> None:
    """6 of 8 solved of one category, k = 2: all (6 + 2·½)/(8 + 2) = 0.7, level (6 + 2·0.7)/10 = 0.74, category
    (6 + 2·0.74)/10 = 0.748. Another category of the level has 0.74, another level 0.7.
    """
    known, other, far = a_problem("known"), a_problem("other", "quote"), a_problem("far", "cancel", level=1)
    like = a_problem("like")
    model = rates(known, other, far, like)
    model.add_all([Played(known, 6, 8)])
    found = model.posteriors()
    assert [found[name].mean for name in ("like", "other", "far")] == pytest.approx([0.748, 0.74, 0.7])
    assert found["like"].solved + found["like"].failed == pytest.approx(2)
    assert found["known"].solved == pytest.approx(2 * 0.748 + 6)
    assert found["known"].failed == pytest.approx(2 * 0.252 + 2)


def test_the_baseline_of_another_split_tells_of_the_category() -> None:
    model = rates(a_problem("trained on"))
    model.add_all([Played(a_problem("of select"), 0, 30)])
    assert model.posteriors()["trained on"].mean < 0.01
    assert list(model.posteriors()) == ["trained on"]


def test_an_episode_counts_half_after_half_life_iterations_since_the_policy_moves() -> None:
    model = rates(a_problem("p"), half_life=5.0)
    model.add_all([Played(a_problem("p"), 8, 8)])
    model.forget(5)
    model.forget(5)
    assert model.counts["problem p"] == [4.0, 4.0]
    model.forget(15)
    assert model.counts["problem p"] == [1.0, 1.0]


def test_a_level_has_the_mean_of_its_problems_not_of_the_episodes_that_were_drawn_there() -> None:
    """One problem of a category, always solved and drawn, beside three of one that never is: near a quarter."""
    easy, hard = a_problem("e", "easy"), [a_problem(f"h{number}", "hard") for number in range(3)]
    model = rates(easy, *hard)
    model.add_all([Played(easy, 900, 900), *(Played(problem, 0, 30) for problem in hard)])
    rate = model.level_rate(3, model.posteriors())
    assert rate is not None
    assert rate.mean == pytest.approx(0.25, abs=0.02)
    assert rate.solved + rate.failed == 990
    assert rates(easy).level_rate(3, rates(easy).posteriors()) is None


def test_difficulty_is_the_level_the_horizon_or_the_number_of_tools() -> None:
    problem = a_problem("p", level=4, calls=("look", "look", "book"))
    assert [difficulty(problem, by) for by in ("level", "calls", "tools")] == [4, 3, 2]


def test_strictness_counts_each_value_once_that_a_solution_must_get_right() -> None:
    """Oslo, LHR, 17, True and B73: a call that is repeated after a timeout makes nothing stricter, nor do words."""
    look = ToolCall(name="look", arguments={"city": "Oslo"})
    book = ToolCall(name="book", arguments={"route": ["LHR", {"cost": 17}], "insured": True})
    turns = [
        ReferenceTurn(calls=[look, look], answer="It costs 17."),
        ReferenceTurn(calls=[book], answer="Booked as B73."),
    ]
    assert difficulty(a_problem("p").model_copy(update={"reference": turns}), "strictness") == 5
    kinds = {item.category: difficulty(item, "strictness") for item in tiny.problems(17, max_level=4)}
    assert (kinds["cancel/none"], kinds["quote/none"], kinds["change/none"]) == (2, 9, 10)


@pytest.mark.parametrize(
    ("argument", "answer", "strictness"),
    [
        ("Oslo", "It is 1,234.50 dollars.", 2),
        (1234.5, "It is 1,234.50 dollars, all of the $1,234.50.", 1),
        (5, "It is 5.", 1),
        (5.0, "The 5 of v1.2.3.", 2),
        ("Oslo", "On 2024-05-01 at 10:30.", 3),
        ("2024-05-01", "On 2024-05-01 at 10:30.", 2),
        ("2024-05-01T10:30", "On 2024-05-01 at 10:30.", 1),
        ("ABC-123", "Booked as ABC-123, 2 seats.", 2),
        ("Pay 40 for B73.", "Paid 40.", 1),
    ],
)
def test_a_figure_is_one_value_however_it_is_written_and_no_second_one_in_the_answer(
    argument: Any, answer: str, strictness: int
) -> None:
    turn = ReferenceTurn(calls=[ToolCall(name="look", arguments={"it": argument})], answer=answer)
    assert difficulty(a_problem("p").model_copy(update={"reference": [turn]}), "strictness") == strictness


def test_the_probability_of_a_band_under_beta_1_1_is_its_width() -> None:
    assert probabilities_between([Beta(1, 1), Beta(2, 1)], 0.1, 0.9) == pytest.approx([0.8, 0.81 - 0.01])


def test_the_share_without_signal_by_hand() -> None:
    """Beta(1, 1), G = 4: 1/5 all solved, 1/5 all failed. Beta(2, 1): (2·3·4·5)/(3·4·5·6) = 1/3 and 24/360 = 1/15."""
    assert share_without_signal(Beta(1, 1), 4) == pytest.approx(2 / 5)
    assert share_without_signal(Beta(2, 1), 4) == pytest.approx(1 / 3 + 1 / 15)


def test_the_recommended_size_is_where_doubling_brings_less_than_a_tenth() -> None:
    """Beta(1, 1): 1 − 2/(G + 1), so 0.6, 0.778, 0.882, 0.939: 16, since 32 has but 1.06 times as many."""
    signal = expected_signal([Beta(1, 1)], [1.0], group_sizes=[6])
    assert list(signal.without_signal) == [4, 6, 8, 16, 32]
    assert signal.recommended == 16
    assert signal.episodes_per_useful_group(8) == pytest.approx(8 / (7 / 9))
    # Every rate near ½: 87% of the groups of 4, 99% of those of 8, all of those of 16.
    assert expected_signal([Beta(200, 200)], [1.0], group_sizes=[4]).recommended == 8


def test_dynamic_sampling_plays_again_what_had_no_signal() -> None:
    """Half without signal, two rounds: 10 · 16 · 8 · (1 + ½ + ¼)."""
    signal = ExpectedSignal({8: 0.5})
    run = {"num_iterations": 10, "problems_per_iteration": 16}
    assert signal.num_episodes(8, replacement_rounds=0, **run) == 1280
    assert signal.num_episodes(8, replacement_rounds=2, **run) == 1280 * 1.75


@given(st.floats(0.05, 50), st.floats(0.05, 50), st.integers(1, 20))
def test_a_larger_group_is_less_often_without_signal(solved: float, failed: float, size: int) -> None:
    rate = Beta(solved, failed)
    assert share_without_signal(rate, size + 1) <= share_without_signal(rate, size) + 1e-12
    assert share_without_signal(rate, 1) == pytest.approx(1)


def test_expected_and_measured_shares_agree_in_a_simulation() -> None:
    """4,000 problems whose rates are drawn from what is known of their category; the same in groups of 4, 8 and 16.

    The standard error of a measured share is under 0.8 points.
    """
    rng = random.Random(3)
    known = [Beta(0.4, 3.6), Beta(2, 2), Beta(3.5, 0.5)] * 1_334
    signal = expected_signal(known, [1.0] * len(known), group_sizes=[8])
    for size in (4, 8, 16):
        without = 0
        for rate in known:
            chance = rng.betavariate(rate.solved, rate.failed)
            without += sum(rng.random() < chance for _ in range(size)) in (0, size)
        assert without / len(known) == pytest.approx(signal.without_signal[size], abs=0.025)
