"""The pipeline alone, over a collector that only notes what it was served: which weights write a batch, and when."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
import torch

from tasks.chat.format import ChatFormat
from tasks.core import background
from tasks.core.records import Group, Score, TokenSequence, Trajectory, Turn
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tasks.rollouts.collect import Abandoned, Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.stages.train.collect_ahead import Batch, Copy, Pipeline, measure_staleness, refuse_stale
from tests import tiny

pytestmark = pytest.mark.slow

NOT_MORE = 120  # seconds; what a test waits for at most


def group(iteration: int, version: int, *, round_number: int = 0) -> Group:
    trajectory = Trajectory(
        problem_id=f"p{iteration}", category="c", request="r", draw=iteration, sample_index=0, policy_version=version,
        environment_fingerprint="f", sequences=[TokenSequence([1, 2], [False, True], [0.0, -0.1])],
        turns=[Turn("t", policy_version=version)], outcome="success", limit=None, checks={"right": True}, num_calls=0,
        num_invalid_calls=0,
    )  # fmt: skip
    return Group(trajectory.problem_id, "c", [trajectory], [Score(1 / 3, {"outcome": 1 / 3})], round_number)


class Fake:
    """A pipeline over a collector that only notes what it was served; every step may take a while."""

    def __init__(self, max_staleness: int, *, num_iterations: int = 6, pause: Callable[[], None] = lambda: None):
        self.pause, self.served, self.is_abandoned = pause, -1, threading.Event()
        self.written: dict[int, int] = {}
        self.num_threads = 0
        self.pipeline = Pipeline(
            self.collect, serve=self.serve, abandon=self.is_abandoned.set, max_staleness=max_staleness,
            num_iterations=num_iterations, num_threads=1,
        )  # fmt: skip

    def serve(self, given: Copy, version: int) -> None:
        assert given.tensors["w"].item() == version
        self.served = version

    def collect(self, iteration: int) -> Batch:
        self.pause()
        self.num_threads = torch.get_num_threads()
        assert not torch.is_grad_enabled()
        self.written[iteration] = self.served
        return Batch(iteration, [group(iteration, self.served)], {"calls": iteration}, {"drawn": iteration})

    def start(self, iteration: int = 0) -> None:
        self.pipeline.start(iteration, self.weights_of(iteration))

    def train(self, iteration: int) -> int:
        """An iteration; the version that wrote its batch."""
        (found,) = self.pipeline(iteration, 0, 1)
        self.pause()
        self.pipeline.publish(iteration, self.weights_of(iteration))
        return found.trajectories[0].policy_version

    @staticmethod
    def weights_of(version: int) -> Callable[[], Copy]:
        return lambda: Copy({"w": torch.tensor(version)}, [])


def test_an_episode_that_ended_while_its_start_was_replayed_has_no_age() -> None:
    ended, played = group(6, 0), group(6, 4)
    ended.trajectories[0].num_replayed_turns = 1  # its only turn
    assert measure_staleness([ended, played], 6, None) == {"staleness_mean": 1, "staleness_max": 1}
    assert measure_staleness([ended], 6, 4) == measure_staleness([], 6, 4) == {}  # nothing to measure: 0 would be fresh


@pytest.mark.parametrize(("max_staleness", "versions"), [(1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3])])
@pytest.mark.parametrize("seed", range(3))
def test_batch_i_is_written_by_version_i_minus_1_minus_n_whatever_the_timing(
    max_staleness: int, versions: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    fake = Fake(max_staleness, pause=lambda: time.sleep(rng.choice([0, 0, 0.005, 0.02])))
    fake.start()
    assert [fake.train(iteration) for iteration in range(1, 7)] == versions
    assert measure_staleness([group(6, versions[-1])], 6, None) == {
        "staleness_mean": max_staleness,
        "staleness_max": max_staleness,
    }
    fake.pipeline.close()
    assert not fake.pipeline.thread.is_alive()
    assert fake.num_threads == 1


def test_while_the_trainer_works_the_next_batch_is_collected() -> None:
    fake = Fake(1)
    fake.start()
    fake.pipeline(1, 0, 1)
    deadline = time.monotonic() + NOT_MORE
    while 2 not in fake.written:
        assert time.monotonic() < deadline
    time.sleep(0.05)
    assert 3 not in fake.written  # that one waits for the weights of iteration 1
    fake.pipeline.close()


def test_a_checkpoint_holds_the_batches_of_older_weights_and_a_run_begun_with_them_goes_on_the_same() -> None:
    """After iteration 2 with n = 2, batches 3 and 4 are older; 5, which version 2 writes, is collected again."""
    fake = Fake(2)
    fake.start()
    for iteration in (1, 2):
        fake.train(iteration)
    while 5 not in fake.written:  # ahead of what the checkpoint may hold
        time.sleep(0.001)
    rows = json.loads(json.dumps([batch.to_row() for batch in fake.pipeline.batches_ahead(2)]))
    fake.pipeline.close()
    other = Fake(2)
    other.pipeline.ahead.extend(map(Batch.from_row, rows))
    other.start(2)
    assert [row["iteration"] for row in rows] == [3, 4]
    assert [other.train(iteration) for iteration in (3, 4, 5, 6)] == [0, 1, 2, 3]
    assert other.written == {5: 2, 6: 3}
    assert Batch.from_row(rows[0]) == Batch(3, [group(3, 0)], {"calls": 3}, {"drawn": 3})
    other.pipeline.close()


def test_after_a_roll_back_no_batch_of_the_abandoned_policy_is_left() -> None:
    """Rolled back after iteration 3: batches 4 and 5, of versions 2 and 3 before, are those of the new version 3."""
    fake = Fake(1)
    fake.start()
    for iteration in (1, 2):
        fake.train(iteration)
    fake.pipeline(3, 0, 1)
    fake.pipeline.discard(3)
    fake.pipeline.publish(3, fake.weights_of(3))
    assert [fake.train(iteration) for iteration in (4, 5, 6)] == [3, 3, 4]
    fake.pipeline.close()


def test_an_error_of_the_thread_is_raised_before_batches_that_are_ready_and_ends_the_thread() -> None:
    fake = Fake(2)
    collect = fake.collect

    def fails(iteration: int) -> Batch:
        if iteration == 3:
            raise ValueError("the flight server is down; start it")
        return collect(iteration)

    fake.pipeline.collect = fails
    fake.start()
    fake.pipeline.thread.join(NOT_MORE)
    for _ in range(2):
        with pytest.raises(ValueError, match="the flight server is down; start it"):
            fake.pipeline(1, 0, 1)
    assert not fake.pipeline.thread.is_alive()
    fake.pipeline.close()


def test_replacements_of_dynamic_sampling_are_handed_out_round_by_round() -> None:
    fake = Fake(1)
    fake.pipeline.collect = lambda iteration: Batch(
        iteration, [group(iteration, 0, round_number=number) for number in (0, 1, 1)], {}, {}
    )
    fake.start()
    assert [len(fake.pipeline(1, number, 1)) for number in (0, 1, 2)] == [1, 2, 0]
    fake.pipeline.close()


@pytest.mark.parametrize(
    ("version", "most", "why"), [(1, 2, "max_staleness is 2"), (5, 2, "no policy has"), (5, None, "no policy has")]
)
def test_a_turn_of_weights_too_old_or_not_there_yet_is_refused(version: int, most: int | None, why: str) -> None:
    """Iteration 5 may be written by versions 2, 3 and 4 with n = 2."""
    collect = refuse_stale(lambda iteration, round_number, count: [group(5, version)], most)
    with pytest.raises(ValueError, match=rf"written by weights -?\d to -?\d versions old, and .*{why}") as error:
        collect(5, 0, 1)
    assert "\n" not in str(error.value)
    for good in (2, 3, 4):
        refuse_stale(lambda iteration, round_number, count, good=good: [group(5, good)], 2)(5, 0, 1)


class WaitingEpisode(TravelDeskEpisode):
    verdicts: ClassVar[list[Future[None]]] = []

    def verdict(self, final_message: str | None) -> Any:
        self.verdicts.append(background.run(asyncio.sleep(600)))
        return self.verdicts[-1]


def test_a_collection_that_is_called_off_does_not_wait_for_its_tools() -> None:
    chat = ChatFormat(tiny.tokenizer(), source="test")
    world = TravelDesk()
    world.episode_class = WaitingEpisode  # type: ignore[misc]
    engine = ScriptedEngine([[chat.encode("Done.")]], end_of_turn=chat.end_of_turn)
    collector = Collector(
        EngineEpisodes(engine, chat, tiny.SAMPLING), world, max_concurrent_episodes=4, seed=0, stage="test"
    )
    ended: list[BaseException] = []

    def collect() -> None:
        try:
            collector.collect([EpisodeKey(problem, 0, 0) for problem in tiny.problems(4)])
        except Abandoned as error:
            ended.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    while not getattr(collector, "num_waits", 0):
        time.sleep(0.001)
    collector.abandon()
    thread.join(NOT_MORE)
    assert len(ended) == 1
    for verdict in WaitingEpisode.verdicts:  # nothing stays on the loop
        verdict.cancel()
