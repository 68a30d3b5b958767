"""The seconds of an iteration's parts add up to those of the iteration."""

from __future__ import annotations

import pytest

from tasks.stages.train.stopwatch import Stopwatch


class Hand:
    """Each look at this clock is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_what_is_neither_waited_for_nor_saved_is_the_update() -> None:
    watch = Stopwatch(Hand())
    with watch.time(1, "iteration_seconds"):
        with watch.time(1, "refresh_seconds"):
            pass
        watch.timed("collect_seconds", lambda iteration, round_number, num_problems: [])(1, 0, 4)
        with watch.time(1, "save_seconds"):
            pass
    (row,) = watch.rows()
    # Nine looks at the clock: the iteration took 7 s, three parts 1 s each.
    assert row["iteration_seconds"] == 7.0
    assert row["update_seconds"] == pytest.approx(4.0)
    watch.note_batch(1, [], engine_seconds=0.5)
    assert watch.idle(1) == {"trainer_idle_seconds": 2.0, "engine_idle_seconds": 6.5}  # it waited for weights and batch
    assert watch.idle_in_all() == {"iteration_seconds": 7.0, "trainer_idle_seconds": 2.0, "engine_idle_seconds": 6.5}


def test_a_batch_that_a_checkpoint_waits_for_is_waited_for_and_not_saved() -> None:
    watch = Stopwatch(Hand())
    with watch.time(1, "iteration_seconds"):
        watch.timed("wait_seconds", lambda iteration: [])(1)
        with watch.time(1, "save_seconds", without="wait_seconds"):
            watch.timed("wait_seconds", lambda version: [])(1)
    (row,) = watch.rows()
    # Eight looks at the clock: the iteration took 7 s, saving 3 s, of which 1 s was the second wait.
    assert (row["wait_seconds"], row["save_seconds"], row["update_seconds"]) == (2.0, 2.0, 3.0)


def test_an_iteration_that_is_only_collected_is_no_row() -> None:
    watch = Stopwatch(Hand())
    watch.timed("collect_seconds", lambda iteration, round_number, num_problems: [])(1, 0, 4)
    assert watch.rows() == []
