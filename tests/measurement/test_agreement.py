"""Agreement of two raters, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.measurement.agreement import agreement_interval, cohens_kappa, confusion

# 20 both yes, 5 first yes, 10 second yes, 15 both no: κ = (0.7 − 0.5) / (1 − 0.5) = 0.4 (the example of Wikipedia).
FIRST = [True] * 25 + [False] * 25
SECOND = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15


def test_kappa_is_what_agreement_has_beyond_chance() -> None:
    assert cohens_kappa(FIRST, SECOND) == pytest.approx(0.4)
    assert confusion(FIRST, SECOND) == {
        (True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15,
    }  # fmt: skip


def test_full_agreement_is_1_and_a_judge_that_always_says_yes_shows_nothing() -> None:
    assert cohens_kappa([True, False], [True, False]) == 1
    assert cohens_kappa([True] * 9 + [False], [True] * 10) == 0  # though they agree on nine of ten
    assert cohens_kappa([True] * 3, [True] * 3) == 0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_kappa_is_the_same_both_ways_and_that_of_scikit_learn(pairs: list[tuple[bool, bool]]) -> None:
    from sklearn.metrics import cohen_kappa_score

    first, second = [one for one, _ in pairs], [other for _, other in pairs]
    assert cohens_kappa(first, second) == pytest.approx(cohens_kappa(second, first))
    if len({*first, *second}) == 2:
        assert cohens_kappa(first, second) == pytest.approx(cohen_kappa_score(first, second))


def test_rows_of_one_group_count_as_one_so_the_interval_is_wider() -> None:
    alone = agreement_interval(FIRST, SECOND, range(50), confidence=0.95)
    assert alone == pytest.approx((0.5625, 0.8090), abs=1e-4)  # Wilson's of 35 of 50
    grouped = agreement_interval(FIRST, SECOND, [number // 5 for number in range(50)], confidence=0.95)
    assert grouped[0] < alone[0] < 0.7 < alone[1] < grouped[1]
