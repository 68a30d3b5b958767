"""The error of a year: what each decision gets, and that a window of 365 days never holds more than was stated."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.stages.promote.allowance import allowance_warnings
from tasks.stages.promote.error_budget import (
    LEAST,
    WINDOW,
    ErrorBudget,
    Spending,
    budget_text,
    error_budget,
    percent_text,
)
from tasks.stages.promote.settings import ErrorBudgetSettings
from tests.simulations.year import Year, alphas_of, is_better, is_no_worse

START = datetime(2026, 1, 1, tzinfo=UTC)
TEN = ErrorBudgetSettings(per_year=0.1, decisions_per_year=10)


def spend(options: ErrorBudgetSettings, days: list[float], *, most: float = 0.025) -> list[Spending]:
    spendings: list[Spending] = []
    for day in days:
        at = START + timedelta(days=day)
        spendings.append(Spending(at, error_budget(options, spendings, at=at, most=most).alpha))
    return spendings


def test_a_decision_gets_its_share_and_beyond_the_plan_half_of_what_is_left():
    """Ten of 1%; the last of them and those after it half of what is left: 0.5%, 0.25%, 0.125%."""
    found = [spending.alpha for spending in spend(TEN, [float(day) for day in range(12)])]
    assert found == pytest.approx([0.01] * 9 + [0.005, 0.0025, 0.00125])


def test_a_year_later_the_error_is_there_again():
    spendings = spend(TEN, [0.0, 1.0, 364.9])
    budget = error_budget(TEN, spendings, at=START + WINDOW + timedelta(hours=1), most=0.025)
    assert budget.num_decisions == 2
    assert budget.spent == pytest.approx(0.02)
    assert budget.renews_at == START + timedelta(days=1) + WINDOW
    empty = error_budget(TEN, [], at=START, most=0.025)
    assert (empty.spent, empty.renews_at, empty.alpha) == (0, None, 0.01)


def test_no_decision_gets_more_than_promote_confidence_allows_one():
    few = ErrorBudgetSettings(per_year=0.5, decisions_per_year=1)
    assert error_budget(few, [], at=START, most=0.025).alpha == 0.025


def test_what_a_clock_set_back_left_in_the_future_counts():
    budget = error_budget(TEN, [Spending(START + timedelta(days=900), 0.01)], at=START, most=0.025)
    assert budget.spent == 0.01


def test_a_statement_made_stricter_leaves_no_power_until_the_window_moves_on():
    spendings = spend(TEN, [float(day) for day in range(9)])
    stricter = ErrorBudgetSettings(per_year=0.05, decisions_per_year=10)
    assert error_budget(stricter, spendings, at=START + timedelta(days=10), most=0.025).alpha == LEAST
    assert error_budget(stricter, spendings, at=START + timedelta(days=400), most=0.025).alpha == 0.005


@given(
    st.lists(st.floats(0, 1500), min_size=1, max_size=120).map(sorted),
    st.floats(0.01, 0.5),
    st.integers(1, 30),
)
def test_the_errors_of_any_365_days_add_up_to_no_more_than_stated(days: list[float], per_year: float, planned: int):
    options = ErrorBudgetSettings(per_year=per_year, decisions_per_year=planned)
    spendings = spend(options, days, most=0.05)
    for last in spendings:
        within = [item.alpha for item in spendings if last.at - WINDOW < item.at <= last.at]
        assert sum(within) <= per_year + LEAST * len(within)


def row(budget: ErrorBudget) -> dict[str, object]:
    return {
        **budget.to_row(this_decision=budget.alpha, is_spent_anew=True),
        "kind": "against the champion",
        "planned": 10,
    }


def test_a_decision_says_what_it_spends_and_when_the_oldest_comes_back():
    first = row(error_budget(TEN, [], at=START, most=0.025))
    assert (first["spent"], first["left"], first["num_decisions"]) == (0.01, 0.09, 1)
    assert budget_text(first) == (
        "This decision may be wrong with a chance of 1%. Of 10% within 365 days 1% are spent, 9% are left; the oldest "
        "is given back on 2027-01-01."
    )
    spendings = spend(TEN, [float(day) for day in range(11)])
    short = row(error_budget(TEN, spendings, at=START + timedelta(days=20), most=0.025))
    test_set = {"median_looks": 1, "max_looks": 10}
    (warning,) = allowance_warnings({"test_set": test_set, "error_budget": short})
    assert "0.13% instead of 1%" in warning
    assert "2027-01-01" in warning
    assert "promote.error_budget.decisions_per_year (10)" in warning
    assert percent_text(0.1 / 365) == "0.027%"
    old = error_budget(TEN, [Spending(START, 0.01)], at=START + timedelta(days=400), most=0.025)
    repeated = {**row(old), **old.to_row(this_decision=0.0001, is_spent_anew=False)}
    assert (repeated["num_decisions"], repeated["renews_at"]) == (0, None)
    assert allowance_warnings({"test_set": test_set, "error_budget": repeated}) == []


@pytest.mark.slow
@pytest.mark.parametrize(("decide", "gain"), [(is_better, 0.0), (is_no_worse, -0.02)])
@pytest.mark.parametrize("alpha", [0.025, alphas_of()[0]])
def test_a_simulated_year_leaves_out_no_night_that_the_product_would_promote(decide, gain: float, alpha: float):
    """The same years with every night that is not far below the screen looked at: the same nights are promoted."""

    class Closely(Year):
        def could_pass(self, ours, theirs, alphas):
            return super().could_pass(ours, theirs, [min(0.4, 30 * one) for one in alphas])

    nights = (alpha,) * 40
    for seed in range(6):
        years = [kind((gain,), (1.0,), 20, nights, decide) for kind in (Year, Closely)]
        screened, looked = [[*year.play(np.random.default_rng(seed))] for year in years]
        assert screened == looked
