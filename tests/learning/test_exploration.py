"""Schedules by numbers, and the most different rollouts against brute force."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.learning.grpo.exploration import (
    iterations_by_samples,
    max_variance_subset,
    samples_at,
    temperature_at,
    top_p_at,
)
from tests.learning.options import NO_EXPLORATION, grpo

REWARDS = st.lists(st.integers(0, 6).map(lambda sixth: sixth / 6), min_size=1, max_size=9)


def points(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"iteration": iteration, "value": value} for iteration, value in pairs]


def exploring(**changed: Any) -> Any:
    whole = {name: changed.pop(name, None) for name in NO_EXPLORATION}
    return grpo(exploration=whole, group_size=8, **changed)


def variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


@given(REWARDS, st.integers(1, 9))
def test_no_other_subset_has_a_larger_variance(rewards: list[float], size: int) -> None:
    kept = max_variance_subset(rewards, size)
    assert kept == sorted(set(kept)) and len(kept) == min(size, len(rewards))
    largest = max(variance([rewards[i] for i in choice]) for choice in combinations(range(len(rewards)), len(kept)))
    assert variance([rewards[index] for index in kept]) == pytest.approx(largest, abs=1e-12)


@given(REWARDS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_kept_rewards_do_not_depend_on_the_order(rewards: list[float], size: int, rng: Any) -> None:
    shuffled = rng.sample(rewards, len(rewards))
    one, other = ([values[i] for i in max_variance_subset(values, size)] for values in (rewards, shuffled))
    assert variance(one) == pytest.approx(variance(other), abs=1e-12)


def test_of_successes_and_failures_half_each_are_kept() -> None:
    kept = max_variance_subset([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0], 4)
    assert sum(index in (1, 4, 7) for index in kept) == 2
    assert 3 in max_variance_subset([0.0, 0.0, 0.0, 1.0], 2)
    assert max_variance_subset([1.0, 0.5, 0.0], 2) == [0, 2]


def test_a_temperature_goes_in_straight_lines_and_stays_after_the_last_point() -> None:
    settings = exploring(temperature=points((1, 1.2), (5, 0.8), (7, 1.0)))
    found = [temperature_at(settings, iteration, otherwise=9.0) for iteration in (1, 2, 3, 5, 6, 7, 50)]
    assert found == pytest.approx([1.2, 1.1, 1.0, 0.8, 0.9, 1.0, 1.0])


def test_top_p_goes_in_straight_lines_and_is_1_without_a_schedule() -> None:
    settings = exploring(top_p=points((1, 0.8), (3, 1.0)), updates_per_batch=1)
    assert [top_p_at(settings, iteration) for iteration in (1, 2, 3, 9)] == pytest.approx([0.8, 0.9, 1.0, 1.0])
    assert top_p_at(exploring(), 1) == top_p_at(grpo(), 1) == 1.0


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"updates_per_batch": 2}, "Set train.updates_per_batch to 1, or train.exploration.top_p to null"),
        ({"steps_per_batch": 2, "updates_per_batch": 1}, "Set train.steps_per_batch to 1"),
        ({"max_staleness": 1, "updates_per_batch": 1, "importance_correction": "token_truncate"},
         "Set train.max_staleness to 0"),
    ],
)  # fmt: skip
def test_a_nucleus_is_refused_where_a_step_is_of_another_policy_than_drew(changed: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        exploring(top_p=points((1, 0.9)), **changed)


def test_a_number_of_samples_holds_from_its_point_on() -> None:
    settings = exploring(samples_per_problem=points((1, 8), (4, 2)))
    assert [samples_at(settings, iteration) for iteration in (1, 3, 4, 9)] == [8, 8, 2, 2]


def test_iterations_are_counted_by_their_samples_up_to_the_end_of_the_run() -> None:
    scheduled = points((1, 8), (4, 2), (6, 8), (90, 4))
    assert iterations_by_samples(exploring(samples_per_problem=scheduled, num_iterations=10)) == {8: 8, 2: 2}
    assert iterations_by_samples(grpo(num_iterations=10, group_size=4)) == {4: 10}


@pytest.mark.parametrize("settings", [grpo(), exploring()])
def test_without_a_schedule_everything_is_as_usual(settings: Any) -> None:
    assert temperature_at(settings, 3, otherwise=0.7) == 0.7
    assert samples_at(settings, 3) == settings.group_size


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": points((2, 1.0))}, "Begin at iteration 1"),
        ({"samples_per_problem": points((1, 4), (1, 8))}, "each point be later"),
        ({"samples_per_problem": points((1, 16))}, "Set train.group_size to 16"),
        ({"keep": 8}, "nothing would be left out"),
        ({"keep": 4, "samples_per_problem": points((1, 8), (9, 4))}, "nothing would be left out"),
        ({"temperature": points((1, 0.0))}, "greater than 0"),
        ({"top_p": points((1, 1.1))}, "less than or equal to 1"),
        ({"prefixes": {"source": "own", "share": points((1, 1.0)), "depth": points((1, 1.0))}}, "less than 1"),
        ({"prefixes": {"source": "own", "share": points((2, 0.5)), "depth": points((1, 1.0))}}, "Begin at iteration 1"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        exploring(**changed)
