"""Credit per turn: by numbers, and without bias where the policy chooses how many turns it takes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import TokenSequence, Trajectory
from tasks.learning.grpo.turn_credit import turn_advantages
from tests.learning.rows import a_group

PROMPT, GO, STOP, LEFT, RIGHT, REPLY = 2, 3, 4, 5, 6, 7
# What an episode writes: it stops at once, or goes on, gets a reply, and chooses a side.
EPISODES = {"stop": [(STOP,)], "left": [(GO,), (LEFT,)], "right": [(GO,), (RIGHT,)]}
ALL = [True] * 9


def an_episode(*turns: tuple[int, ...]) -> Trajectory:
    """The prompt, and each turn with a reply after it."""
    (found,) = a_group(0, [0.0]).trajectories
    ids, mask = [PROMPT], [False]
    for turn in turns:
        ids += [*turn, REPLY]
        mask += [True] * len(turn) + [False]
    found.sequences = [TokenSequence(ids, mask, [0.0] * len(ids))]
    return found


def test_a_turn_is_compared_with_the_others_that_came_the_same_way() -> None:
    group = [an_episode(*EPISODES[name]) for name in ("left", "right", "left", "stop")]
    credit = turn_advantages(group, [1.0, 0.0, 1.0, 0.5], ALL)
    assert credit[0] == pytest.approx([1 - 0.5, 1 - 0.5])  # others: (0 + 1 + .5) / 3, then (0 + 1) / 2
    assert credit[1] == pytest.approx([0 - 2.5 / 3, 0 - 1.0])
    assert credit[3] == pytest.approx([0.5 - 2 / 3])


def test_a_turn_at_a_place_where_no_other_was_keeps_the_peers_of_the_turn_before() -> None:
    group = [an_episode((GO,), (LEFT, LEFT), (RIGHT,)), an_episode((GO,), (RIGHT,)), an_episode((STOP,))]
    credit = turn_advantages(group, [1.0, 0.0, 0.4], ALL)
    assert credit[0] == pytest.approx([0.8, 1.0, 1.0, 1.0])


def test_what_is_not_counted_gets_nothing_and_is_compared_with_nobody() -> None:
    group = [an_episode((GO,)), an_episode((GO,)), an_episode((GO,))]
    assert turn_advantages(group, [1.0, 0.0, 0.0], [True, False, True]) == [[1.0], [0.0], [-1.0]]
    assert turn_advantages(group, [1.0, 0.0, 0.0], [True, False, False]) == [[0.0], [0.0], [0.0]]


@pytest.mark.parametrize("reward", [0.3, 0.7, 0.85, 0.95])  # eight of the last three do not add up exactly
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    group = [an_episode(*EPISODES[name]) for name in ("left", "right", *["stop"] * 6)]
    assert turn_advantages(group, [reward] * 8, [True] * 8) == [[0.0, 0.0], [0.0, 0.0], *[[0.0]] * 6]


Policy = tuple[float, float]  # the chances to go on, and then to choose left
CHANCE = st.floats(0.05, 0.95)
REWARD = st.floats(-1, 1)


def chance(name: str, policy: Policy) -> float:
    go, left = policy
    return {"stop": 1 - go, "left": go * left, "right": go * (1 - left)}[name]


def scores(name: str, policy: Policy) -> list[tuple[float, float]]:
    """The gradient of each turn's log-chance by the two logits."""
    go, left = policy
    turns = {"stop": [(-go, 0.0)], "left": [(1 - go, 0.0), (0.0, 1 - left)], "right": [(1 - go, 0.0), (0.0, -left)]}
    return turns[name]


def true_gradient(reward: dict[str, float], policy: Policy) -> tuple[float, float]:
    go, left = policy
    after = left * reward["left"] + (1 - left) * reward["right"]
    return go * (1 - go) * (after - reward["stop"]), go * left * (1 - left) * (reward["left"] - reward["right"])


def expected_gradient(estimate: Any, reward: dict[str, float], policy: Policy, size: int) -> tuple[float, float]:
    """Over every group of `size` that the policy can write, each with its chance."""
    total = [0.0, 0.0]
    for names in product(EPISODES, repeat=size):
        weight = math.prod(chance(name, policy) for name in names) / size
        for name, credits in zip(names, estimate(names, [reward[name] for name in names]), strict=True):
            for credit, score in zip(credits, scores(name, policy), strict=True):
                total = [part + weight * credit * by for part, by in zip(total, score, strict=True)]
    return total[0], total[1]


def ours(names: tuple[str, ...], rewards: list[float]) -> list[list[float]]:
    return turn_advantages([an_episode(*EPISODES[name]) for name in names], rewards, ALL)


def by_turn_number(names: tuple[str, ...], rewards: list[float]) -> list[list[float]]:
    """verl issue 7244: a turn earns 0.5 and the last one the reward; each is centred over the others' turns of the same
    number, and a turn gets what comes from it on. How many means are taken off is the trajectory's own choice.
    """
    earned = [[*[0.5] * (len(EPISODES[name]) - 1), reward] for name, reward in zip(names, rewards, strict=True)]
    credits = []
    for number, turns in enumerate(earned):
        centred = []
        for turn, value in enumerate(turns):
            others = [row[turn] for other, row in enumerate(earned) if other != number and turn < len(row)]
            centred.append(value - (sum(others) / len(others) if others else 0.0))
        credits.append([sum(centred[turn:]) for turn in range(len(turns))])
    return credits


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(REWARD, REWARD, REWARD, CHANCE, CHANCE, st.integers(2, 4))
def test_the_gradient_has_no_bias(stop: float, left: float, right: float, go: float, then: float, size: int) -> None:
    reward = {"stop": stop, "left": left, "right": right}
    found = expected_gradient(ours, reward, (go, then), size)
    assert found == pytest.approx(true_gradient(reward, (go, then)), abs=1e-9)


def test_the_natural_construction_is_biased_where_the_policy_chooses_how_many_turns_it_takes() -> None:
    """All three ways are worth the same, so the true gradient is 0; this one is not."""
    whole = {"stop": 1.0, "left": 1.0, "right": 1.0}
    after_half = {"stop": 1.0, "left": 0.5, "right": 0.5}  # with 0.5 for the turn before it
    assert true_gradient(whole, (0.5, 0.5)) == (0.0, 0.0)
    bias, _ = expected_gradient(by_turn_number, after_half, (0.5, 0.5), 3)
    assert abs(bias) > 0.05
    assert expected_gradient(ours, whole, (0.5, 0.5), 3) == pytest.approx((0.0, 0.0))
