"""Which groups begin with replayed turns, and with which: numbers one can count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.records import Group, Problem, Score, StopReason, TokenSequence, Trajectory, Turn
from tasks.learning.grpo.metrics import rollout_metrics
from tasks.learning.grpo.prefixes import Messages, Prefixes
from tasks.learning.shared.exploration_settings import PrefixSettings
from tests import tiny
from tests.learning.options import grpo

PROBLEMS = tiny.problems(8)
FOUR_TURNS = [[1, 9], [2, 9], [3, 9], [4, 9]]


def prefixes(
    source: str, *, share: float = 0.5, depth: float = 1.0, reference: Callable[[Problem], Messages] | None = None
) -> Prefixes:
    schedules = {name: [{"iteration": 1, "value": value}] for name, value in (("share", share), ("depth", depth))}
    settings = PrefixSettings.model_validate({"source": source, **schedules})
    return Prefixes(settings, reference or (lambda problem: FOUR_TURNS), seed=7)


def episode(
    problem: Problem, is_success: bool, *, stops: tuple[StopReason, ...] = ("end_of_turn",) * 3, replayed: int = 0
):
    """Two given tokens, then for each turn two written ones (n, 9) and a reply of one token; failures write 10 more."""
    ids, mask = [0, 0], [False, False]
    for number in range(len(stops)):
        ids += [number + (1 if is_success else 11), 9, 5]
        mask += [True, True, False]
    return Trajectory(
        problem_id=problem.id, category=problem.category, request="", draw=1, sample_index=0, policy_version=0,
        environment_fingerprint="", sequences=[TokenSequence(ids, mask, [0.0] * len(ids))],
        turns=[Turn("", stop_reason=stop) for stop in stops], outcome="success" if is_success else "failure",
        limit=None, checks={}, num_calls=0, num_invalid_calls=0, num_replayed_turns=replayed,
    )  # fmt: skip


def group(problem: Problem, *solved: bool, **how: Any) -> Group:
    played = [episode(problem, is_success, **how) for is_success in solved]
    return Group(problem.id, problem.category, played, [Score(float(item), {}) for item in solved])


def test_a_share_of_the_groups_begins_with_turns_of_the_reference_and_never_with_its_last() -> None:
    """Half of 8 problems; of four turns one to three are replayed."""
    drawn = [start for iteration in range(1, 30) for start in prefixes("reference").draw(iteration, 0, PROBLEMS)]
    assert sum(map(bool, drawn)) == 29 * 4
    assert {len(start) for start in drawn if start} == {1, 2, 3}
    assert all(start == FOUR_TURNS[: len(start)] for start in drawn)


@given(st.floats(0.01, 1), st.integers(1, 9), st.integers(1, 50))
def test_what_is_replayed_is_within_the_depth_and_leaves_a_turn(depth: float, num_turns: int, iteration: int) -> None:
    known = prefixes("reference", depth=depth, reference=lambda problem: [[1]] * num_turns)
    for start in known.draw(iteration, 0, PROBLEMS):
        assert len(start) <= min(num_turns - 1, max(1, int(depth * num_turns)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "num_groups", "counts", "mean"),
    [
        (0.2, 4, {0, 1}, 0.8),
        (0.7, 10, {6, 7}, 7.0),  # in floats 0.7 · 10 may be a little less
        (0.29, 100, {28, 29}, 29.0),
        (0.9, 4, {3}, 3.0),  # one begins at its start
    ],
)
def test_a_share_that_is_no_whole_number_of_groups_holds_on_average(
    share: float, num_groups: int, counts: set[int], mean: float
) -> None:
    """Over 400 iterations the mean of a draw of 0 or 1 is within 0.08, four standard errors."""
    problems = (PROBLEMS * 13)[:num_groups]
    drawn = [sum(map(bool, prefixes("reference", share=share).draw(number, 0, problems))) for number in range(1, 401)]
    assert set(drawn) <= counts
    assert sum(drawn) / 400 == pytest.approx(mean, abs=0.08)


def test_a_round_of_one_replacement_begins_with_a_prefix_as_often_as_any_other() -> None:
    drawn = [prefixes("reference", share=0.25).draw(number, 1, PROBLEMS[:1])[0] for number in range(1, 401)]
    assert sum(map(bool, drawn)) / 400 == pytest.approx(0.25, abs=0.09)


def test_a_reference_helps_where_a_problem_mostly_fails_and_those_that_always_fail_come_first() -> None:
    known = prefixes("reference", share=0.25)
    known.learn([group(PROBLEMS[0], False, False, False, False), *(group(p, False, True, False) for p in PROBLEMS[1:])])
    first = known.draw(1, 0, PROBLEMS)
    assert first[0] and sum(map(bool, first)) == 2
    known.learn([group(problem, True, True, False) for problem in PROBLEMS])
    assert not any(known.draw(2, 0, PROBLEMS))


def test_of_its_own_episodes_a_success_helps_and_a_failure_hinders() -> None:
    """Solved 1 of 3: turns of the success; 2 of 3: of the failure; 1 of 2: neither; not played yet: nothing."""
    known = prefixes("own", share=0.99)
    mostly_failing, mostly_solved, even, unknown = PROBLEMS[:4]
    known.learn([
        group(mostly_failing, False, True, False), group(mostly_solved, True, True, False), group(even, True, False)
    ])  # fmt: skip
    help_, hinder, *rest = known.draw(1, 0, [mostly_failing, mostly_solved, even, unknown])
    assert help_ in ([[1, 9]], [[1, 9], [2, 9]])
    assert hinder in ([[11, 9]], [[11, 9], [12, 9]])
    assert rest == [[], []]


def test_a_turn_that_a_limit_cut_ends_what_can_be_replayed() -> None:
    known = prefixes("own", share=0.99)
    known.learn([group(PROBLEMS[0], False, True, False, stops=("end_of_turn", "max_tokens_per_turn", "end_of_turn"))])
    assert {len(known.draw(iteration, 0, PROBLEMS)[0]) for iteration in range(1, 9)} == {1}


def test_a_group_that_began_with_a_prefix_teaches_nothing_about_the_problem() -> None:
    known = prefixes("own")
    known.learn([group(PROBLEMS[0], True, True, False, replayed=1)])
    assert known.state() == {"success": {}, "own": {}}


def test_what_is_known_survives_a_checkpoint_and_draws_the_same() -> None:
    known, again = prefixes("own"), prefixes("own")
    known.learn([group(problem, False, True, False) for problem in PROBLEMS])
    again.load_state(json.loads(json.dumps(known.state())))
    drawn = known.draw(3, 1, PROBLEMS)
    assert any(drawn) and drawn == again.draw(3, 1, PROBLEMS) != known.draw(3, 0, PROBLEMS)


def test_success_in_the_metrics_is_of_groups_that_were_played_from_their_start() -> None:
    """1 of 2 from the start, 3 of 3 from a prefix: 0.5, and 1.0 beside it. Episodes count all, as groups do."""
    groups = [group(PROBLEMS[0], True, False), group(PROBLEMS[1], True, True, True, replayed=2)]
    row = rollout_metrics(groups, grpo(), None)
    assert (row["success_rate"], row["mean_reward"], row["prefixed_success_rate"]) == (0.5, 0.5, 1.0)
    assert (row["num_episodes"], row["informative_group_share"]) == (5, 0.5)
    assert (row["num_prefixed_groups"], row["mean_replayed_turns"]) == (1, 2)


@pytest.mark.parametrize("replayed", [0, 2])
def test_a_row_names_its_replayed_turns_only_where_there_are_some(replayed: int) -> None:
    played = episode(PROBLEMS[0], True, replayed=replayed)
    row = json.loads(json.dumps(played.to_row()))
    assert ("num_replayed_turns" in row) is bool(replayed)
    assert Trajectory.from_row(row) == played
    assert len(played.own_turns) == 3 - replayed
