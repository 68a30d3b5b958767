"""The rules of a warm start's attempts, by numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.core.records import Trajectory
from tasks.measurement.statistics import success_by_problem
from tasks.stages.evaluate.racing import race
from tasks.stages.warm_start import success
from tasks.stages.warm_start.attempts import Attempt, EndedAttempt, Patience, best_attempt, next_attempt
from tests import tiny
from tests.learning.options import supervised
from tests.measurement.synthetic import trajectory

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


PROBLEMS = tiny.problems(10)


def win_race(played: dict[str, list[Trajectory]], monkeypatch: pytest.MonkeyPatch) -> str:
    found = {name: success_by_problem(items, lost_fail=True) for name, items in played.items()}
    return race([*played], PROBLEMS, lambda block: found, None, seed=0).winner


def win_among_attempts(played: dict[str, list[Trajectory]], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(success, "checked_problems", lambda *_: PROBLEMS)
    monkeypatch.setattr(success, "load_environment", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(success, "sample_episodes", lambda model, *_, **__: played[model.name])
    settings: Any = SimpleNamespace(environment=None, play=lambda _: None)
    paths: Any = None
    best = best_attempt([
        EndedAttempt(number, None, 0.1, 12, "num_steps", measured, None)
        for number, name in enumerate(played)
        if (measured := success.measure_success(Path(name), settings, paths, num_problems=10, finished=Path("none")))
    ])  # fmt: skip
    assert best is not None
    return [*played][best.number]


@pytest.mark.parametrize("find_winner", [win_race, win_among_attempts])
@pytest.mark.parametrize("num_lost", [0, 1, 5])
def test_a_failure_that_the_environment_loses_makes_no_model_better(
    find_winner: Any, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both solve five of ten problems, so the first wins, however many of its failures the second crashed a tool on."""
    played = {
        name: [
            trajectory(item.id, place < 5, outcome="environment_error" if place >= 10 - lost else None)
            for place, item in enumerate(PROBLEMS)
        ]
        for name, lost in (("first", 0), ("second", num_lost))
    }
    assert find_winner(played, monkeypatch) == "first"


def test_without_a_stop_there_is_one_attempt() -> None:
    (only,) = ended(0.0)
    assert next_attempt([only], supervised()) is None


def test_patience_counts_the_checks_since_the_lowest_loss() -> None:
    patience = Patience(2)
    assert [patience.observe(loss) for loss in (3.0, 2.0, 2.0)] == [True, True, False]
    assert not patience.is_over
    assert not patience.observe(2.5) and patience.is_over
    assert patience.lowest == 2.0
