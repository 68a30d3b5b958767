"""The rules of a warm start's attempts, by numbers."""

from __future__ import annotations

from typing import Any

from tasks.stages.warm_start.attempts import Attempt, EndedAttempt, Patience, best_attempt, next_attempt
from tests.learning.options import supervised

STOP: dict[str, Any] = {
    "num_problems": 10, "minimum_success": 0.3, "max_attempts": 4, "rate_factor": 0.5,
    "held_out_share": 0.0, "check_interval": 2, "patience": 2,
}  # fmt: skip
SETTINGS = supervised(stop=STOP, learning_rate=0.01)


def ended(*success: float | None) -> list[EndedAttempt]:
    """Attempts by the rules, each with a success of the list."""
    done: list[EndedAttempt] = []
    for reached in success:
        attempt = next_attempt(done, SETTINGS)
        assert attempt is not None
        end = "not_finite" if reached is None else "num_steps"
        done.append(EndedAttempt(attempt.number, attempt.start, attempt.learning_rate, 12, end, reached, None))  # type: ignore[arg-type]
    return done


def test_an_attempt_that_reaches_the_minimum_is_the_last() -> None:
    assert next_attempt(ended(0.3), SETTINGS) is None
    assert next_attempt(ended(0.1, 0.5), SETTINGS) is None


def test_an_attempt_that_is_the_best_so_far_goes_on_with_its_weights() -> None:
    assert next_attempt(ended(0.0), SETTINGS) == Attempt(1, 0, 0.01)
    assert next_attempt(ended(0.1, 0.2), SETTINGS) == Attempt(2, 1, 0.01)


def test_an_attempt_that_brought_nothing_is_followed_by_one_anew_at_a_lower_rate() -> None:
    assert next_attempt(ended(0.1, 0.1), SETTINGS) == Attempt(2, None, 0.005)
    assert next_attempt(ended(0.1, 0.1, 0.05), SETTINGS) == Attempt(3, None, 0.0025)


def test_a_gradient_that_is_not_finite_is_followed_by_an_attempt_anew() -> None:
    assert next_attempt(ended(None), SETTINGS) == Attempt(1, None, 0.005)


def test_the_bound_ends_it_and_the_first_of_the_best_is_kept() -> None:
    done = ended(0.1, 0.2, 0.2, 0.0)
    assert next_attempt(done, SETTINGS) is None
    assert best_attempt(done) is done[1]


def test_without_a_stop_there_is_one_attempt() -> None:
    (only,) = ended(0.0)
    assert next_attempt([only], supervised()) is None


def test_patience_counts_the_checks_since_the_lowest_loss() -> None:
    patience = Patience(2)
    assert [patience.observe(loss) for loss in (3.0, 2.0, 2.0)] == [True, True, False]
    assert not patience.is_over
    assert not patience.observe(2.5) and patience.is_over
    assert patience.lowest == 2.0
