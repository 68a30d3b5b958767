"""Best of k at the cost of one episode, by numbers a person can check."""

from __future__ import annotations

import pytest

from tasks.core.records import TokenSequence, Trajectory
from tasks.measurement.tries import best_of_k, pass_within
from tests.measurement.synthetic import trajectory


def episodes(success_by_problem: dict[str, list[bool]], *, tokens: int) -> list[Trajectory]:
    found = []
    for problem, successes in success_by_problem.items():
        for index, success in enumerate(successes):
            item = trajectory(problem, success, sample_index=index)
            item.sequences = [TokenSequence([1] * tokens, [True] * tokens, [-0.1] * tokens)]
            found.append(item)
    return found


START = {"a": [True, False, False, False], "b": [True, True, False, False], "c": [False] * 4}
TRAINED = {"a": [True], "b": [True], "c": [False]}


def test_an_episode_of_twice_the_tokens_buys_two_tries():
    # pass@2 of 4: a 1 − C(3,2)/C(4,2) = 1/2, b 1 − C(2,2)/6 = 5/6, c 0; their mean is 4/9. pass@3: 3/4, 1 and 0.
    found = best_of_k(episodes(START, tokens=10), episodes(TRAINED, tokens=20), confidence=0.95)
    assert (found["k"], found["same_cost"], found["num_problems"], found["num_samples"]) == (2.0, 2.0, 3, 4)
    assert found["success_rate"] == pytest.approx(4 / 9, abs=1e-6)
    assert found["ci_low"] < 4 / 9 < found["ci_high"]
    assert found["tries_to_match"] == 4  # 2/3: a and b are solved within four, and three give 7/12


def test_half_a_try_more_is_the_mean_of_one_and_two():
    # a: 1/4 and 1/2; the mean of 1 and 2 tries is 1.5.
    assert pass_within(4, 1, 1.5) == pytest.approx(0.375)
    assert pass_within(4, 1, 2) == 0.5


def test_a_shorter_episode_still_buys_the_start_one_whole_try():
    found = best_of_k(episodes(START, tokens=30), episodes(TRAINED, tokens=10), confidence=0.95)
    assert found["k"] == 1.0
    assert found["success_rate"] == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(("num_samples", "num_successes"), [(3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 3), (10, 1)])
def test_one_try_of_a_policy_matches_itself(num_samples: int, num_successes: int):
    solved = {name: [place < num_successes for place in range(num_samples)] for name in "abcdefg"}
    played = episodes(solved, tokens=10)
    assert best_of_k(played, played, confidence=0.95)["tries_to_match"] == 1


def test_tries_that_were_not_measured_are_not_made_up():
    start = {name: successes[:1] for name, successes in START.items()}
    found = best_of_k(episodes(start, tokens=10), episodes({**TRAINED, "c": [True]}, tokens=50), confidence=0.95)
    assert (found["k"], found["same_cost"], found["tries_to_match"]) == (1.0, 5.0, None)
