"""Did the champion fall: numbers checkable by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tasks.pipeline.champion_check import (
    DriftCheckSettings,
    check_error,
    choose_problems,
    confidence_of,
    has_fallen,
    most_change,
)
from tasks.stages.promote.settings import ErrorBudgetSettings

NOW = datetime(2026, 11, 22, tzinfo=UTC)
SETTINGS = DriftCheckSettings(
    num_problems=3, samples_per_problem=1, error_budget=ErrorBudgetSettings(per_year=0.1, decisions_per_year=10)
)


def interval(rate: float, below: float, above: float) -> dict[str, float]:
    return {"success_rate": rate, "ci_low": rate - below, "ci_high": rate + above}


def test_the_change_is_bounded_by_both_intervals_squared_and_added():
    """60 against 90 points, 4 above and 3 below: at most -30 + 5."""
    assert most_change(interval(0.6, 0.1, 0.04), interval(0.9, 0.03, 0.1)) == pytest.approx(-0.25)


@pytest.mark.parametrize(("promoted", "fell"), [(0.651, True), (0.649, False)])
def test_it_fell_where_the_whole_interval_of_the_change_is_below_zero(promoted: float, fell: bool):
    assert has_fallen(interval(0.6, 0.1, 0.04), interval(promoted, 0.03, 0.1)) is fell


def test_a_fresh_interval_below_the_other_always_counts_and_a_better_champion_never():
    assert has_fallen(interval(0.6, 0.1, 0.04), interval(0.7, 0.05, 0.1))
    assert not has_fallen(interval(0.9, 0.01, 0.01), interval(0.6, 0.01, 0.01))


def test_each_check_has_its_share_of_the_year_and_those_beyond_the_plan_half_of_what_is_left():
    past: list[dict[str, object]] = []
    for day in range(11):
        at = NOW + timedelta(days=day)
        past.append({"at": at.isoformat(), "alpha": check_error(SETTINGS, past, at=at)})
    assert [row["alpha"] for row in past[:9]] == [pytest.approx(0.01)] * 9
    assert past[9]["alpha"] == pytest.approx(0.005)
    assert sum(float(str(row["alpha"])) for row in past) < 0.1
    assert check_error(SETTINGS, past, at=NOW + timedelta(days=400)) == pytest.approx(0.01)


def test_both_ends_of_an_interval_share_its_error():
    assert confidence_of(0.01) == pytest.approx(0.98)


def test_each_check_plays_other_problems_and_the_same_ones_when_it_is_repeated():
    problems = list(range(100))
    first, again, next_one = (choose_problems(problems, SETTINGS, seed=11, number=number) for number in (1, 1, 2))
    assert first == again == sorted(first)
    assert first != next_one
    assert len(first) == 3
    assert choose_problems([1, 2], SETTINGS, seed=11, number=1) == [1, 2]
