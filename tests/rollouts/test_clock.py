"""The clock of a collection, set by hand: seconds of turns, of what is written beside them, and of tools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tasks.rollouts.clock import RolloutClock


class Hand:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def episode(name: str, prompt: int) -> Any:
    key = SimpleNamespace(problem=SimpleNamespace(id=name), draw=1)
    return _Episode(key=key, token_ids=[0] * prompt, sampled_mask=[False] * prompt, fault=None)


class _Episode(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def write(run: Any, *, sampled: int, replied: int) -> None:
    run.token_ids += [0] * (sampled + replied)
    run.sampled_mask += [True] * sampled + [False] * replied


def test_turns_know_their_tokens_their_seconds_and_what_was_written_beside_them() -> None:
    hand = Hand()
    clock, one, other = RolloutClock(hand), episode("one", 10), episode("other", 20)
    clock.begin_turn(one)
    hand.now = 1.0  # alone for a second
    clock.begin_turn(other)
    hand.now = 3.0  # two live turns for two seconds
    write(one, sampled=5, replied=2)
    clock.end_turn(one)
    clock.begin_wait(one)
    hand.now = 3.5
    clock.end_wait(one)
    clock.begin_turn(one)
    hand.now = 4.0
    write(one, sampled=1, replied=0)
    clock.end_turn(one)
    clock.end_episode(one)
    (row,) = clock.rows()
    first, second = row["turns"]
    assert row["problem_id"] == "one"
    assert first == {
        "fed": 10, "sampled": 5, "engine_seconds": 3.0, "live_seconds": 5.0, "fed_meanwhile": 30, "tool_seconds": 0.5
    }  # fmt: skip
    assert (second["fed"], second["sampled"], second["engine_seconds"]) == (2, 1, 0.5)


def test_an_episode_that_a_fault_ended_is_not_kept() -> None:
    clock, run = RolloutClock(Hand()), episode("one", 10)
    clock.begin_turn(run)
    write(run, sampled=1, replied=0)
    clock.end_turn(run)
    run.fault = "down"
    clock.end_episode(run)
    assert clock.rows() == []
