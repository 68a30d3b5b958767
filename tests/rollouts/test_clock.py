"""The clocks of a collection, set by hand: tokens of turns, seconds of tools, seconds and steps of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tasks.core.records import TokenSequence
from tasks.rollouts.clock import RolloutClock
from tasks.rollouts.engine_clock import EngineClock


class Hand:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def episode(name: str, prompt: int) -> Any:
    key = SimpleNamespace(problem=SimpleNamespace(id=name), draw=1)
    tokens = TokenSequence()
    tokens.append_given([0] * prompt)
    return _Episode(key=key, sequences=[tokens], fault=None)


class _Episode(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def write(run: Any, *, sampled: int, replied: int) -> None:
    run.sequences[-1].append_sampled([0] * sampled, [0.0] * sampled, [0] * sampled)
    run.sequences[-1].append_given([0] * replied)


def test_turns_know_their_tokens_and_the_seconds_of_their_tools() -> None:
    hand = Hand()
    clock, one = RolloutClock(hand), episode("one", 10)
    clock.begin_turn(one)
    write(one, sampled=5, replied=2)
    clock.end_turn(one)
    hand.now = 3.0
    clock.begin_wait(one)
    hand.now = 3.5
    clock.end_wait(one)
    clock.begin_turn(one)
    write(one, sampled=1, replied=0)
    clock.end_turn(one)
    clock.end_episode(one)
    (row,) = clock.rows()
    assert row["problem_id"] == "one"
    assert row["turns"] == [
        {"fed": 10, "sampled": 5, "tool_seconds": 0.5},
        {"fed": 2, "sampled": 1, "tool_seconds": 0.0},
    ]


def play_two_turns(clock: EngineClock, hand: Hand) -> list[dict[str, Any]]:
    """Two turns begin; one ends after 3 steps in 1 s, the other 2 s of polls later, between which half a second passes
    in the process that plays.
    """
    clock.submit(1, 10)
    clock.submit(2, 20)
    clock.begin_poll(2)
    hand.now = 1.0
    clock.end_poll([(1, 3)])
    hand.now = 1.5
    clock.begin_poll(1)
    hand.now = 3.5
    clock.end_poll([(2, 7)])
    return clock.rows()


def test_between_replies_the_engines_steps_and_seconds_are_counted_and_the_process_apart() -> None:
    first, second = play_two_turns(clock := EngineClock(is_beside=False, now=(hand := Hand())), hand)
    assert first == {
        "seconds": 1.0, "steps": 3.0, "live_seconds": 2.0, "fed": 30, "begun": 2, "reads": 1, "host_seconds": 0.0,
        "host_turns": 1,
    }  # fmt: skip
    assert (second["seconds"], second["steps"], second["host_seconds"], second["reads"]) == (2.0, 4.0, 0.5, 0)
    assert clock.seconds == 3.0


def test_an_engine_beside_the_process_goes_on_between_polls() -> None:
    _, second = play_two_turns(clock := EngineClock(is_beside=True, now=(hand := Hand())), hand)
    assert (second["seconds"], second["live_seconds"], second["host_seconds"]) == (2.5, 2.5, 0.5)
    assert clock.seconds == 3.5


def test_an_episode_that_a_fault_ended_is_not_kept() -> None:
    clock, run = RolloutClock(Hand()), episode("one", 10)
    clock.begin_turn(run)
    write(run, sampled=1, replied=0)
    clock.end_turn(run)
    run.fault = "down"
    clock.end_episode(run)
    assert clock.rows() == []
