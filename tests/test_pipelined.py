"""Rollouts ahead of the trainer: which weights write a batch, whatever the timing; errors, roll-backs, kills."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tasks import training
from tasks.environments import background
from tasks.environments.travel_desk import TravelDesk, TravelDeskEpisode
from tasks.pipelining import Batch, Pipeline, bounded, staleness
from tasks.records import Group, Score, Trajectory, Turn
from tasks.rollouts.chat import ChatFormat
from tasks.rollouts.collect import Abandoned, Collector
from tasks.rollouts.episode import EpisodeKey
from tasks.rollouts.scripted_engine import ScriptedEngine
from tasks.storage import content_hash
from tests import tiny
from tests.test_training import LORA, Killed, alarm_at, run, settings

pytestmark = pytest.mark.slow

NOT_MORE = 120  # seconds; what a test waits for at most


def group(iteration: int, version: int, *, round_number: int = 0) -> Group:
    trajectory = Trajectory(
        problem_id=f"p{iteration}", category="c", request="r", draw=iteration, sample_index=0, policy_version=version,
        environment_fingerprint="f", token_ids=[1, 2], sampled_mask=[False, True], sampler_logp=[0.0, -0.1],
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

    def serve(self, weights: dict[str, torch.Tensor], version: int) -> None:
        assert weights["w"].item() == version
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
    def weights_of(version: int) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: {"w": torch.tensor(version)}


@pytest.mark.parametrize(("max_staleness", "versions"), [(1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2, 3])])
@pytest.mark.parametrize("seed", range(3))
def test_batch_i_is_written_by_version_i_minus_1_minus_n_whatever_the_timing(
    max_staleness: int, versions: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    fake = Fake(max_staleness, pause=lambda: time.sleep(rng.choice([0, 0, 0.005, 0.02])))
    fake.start()
    assert [fake.train(iteration) for iteration in range(1, 7)] == versions
    assert staleness([group(6, versions[-1])], 6) == {"staleness_mean": max_staleness, "staleness_max": max_staleness}
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


@pytest.mark.parametrize("version", [1, 5])
def test_a_turn_of_weights_too_old_or_not_there_yet_is_refused(version: int) -> None:
    """Iteration 5 may be written by versions 2, 3 and 4 with n = 2."""
    collect = bounded(lambda iteration, round_number, count: [group(5, version)], 2)
    with pytest.raises(ValueError, match=r"written by weights -?\d to -?\d versions old.*max_staleness is 2") as error:
        collect(5, 0, 1)
    assert "\n" not in str(error.value)
    for good in (2, 3, 4):
        bounded(lambda iteration, round_number, count, good=good: [group(5, good)], 2)(5, 0, 1)


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
    collector = Collector(engine, chat, world, sampling=tiny.SAMPLING, max_concurrent_episodes=4, seed=0, stage="test")
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


# ── Whole runs of the real parts. ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def _a_reward_an_untrained_model_can_earn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "reward", tiny.reward_of_any_text)


def pipelined(max_staleness: int = 1, **changed: Any) -> Any:
    adaptive = {"problem_sampler": "adaptive", "mismatch_correction": "token_truncate"}
    return settings(**{**adaptive, "max_staleness": max_staleness, **changed})


def result(place: Path, *, last: str = "step-000006") -> tuple[str, str]:
    return content_hash(place / "output"), content_hash(place / "resume" / last)


def late(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return call


def once_all_is_collected(method: Callable[..., Any]) -> Callable[..., Any]:
    """The collector is as far ahead as it can be."""

    def call(run: training.TrainingRun, *arguments: Any) -> Any:
        assert run.pipeline is not None
        while run.pipeline.num_open > run.pipeline.collected.qsize():
            time.sleep(0.002)
        return method(run, *arguments)

    return call


def collector_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "collector"]


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "changed"), [(1, {}), (2, {"lora": LORA})])
def test_delays_on_either_side_change_no_bit(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int, changed: dict[str, Any]
) -> None:
    options = pipelined(max_staleness, **changed)
    expected = run(options, start, tmp_path / "plain")
    serve = training.TrainingRun._serve

    def serve_after_a_step(self: Any, weights: Any, version: int) -> None:
        """The trainer's weights are then others than those that are to be served."""
        deadline = time.monotonic() + 1
        while self.trainer.optimizer.steps_done <= version * 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        serve(self, weights, version)

    sides = {
        "trainer": (training.GRPOTrainer, "_optimizer_step", late(training.GRPOTrainer._optimizer_step, 0.2)),
        "collector": (Collector, "collect", late(Collector.collect, 0.2)),
        "refresh": (training.TrainingRun, "_serve", serve_after_a_step),
    }
    for side, (owner, name, delayed) in sides.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, delayed)
            assert run(options, start, tmp_path / side) == expected
        assert result(tmp_path / side) == result(tmp_path / "plain")
    ages = [min(number, max_staleness) for number in range(6)]
    assert [row["staleness_max"] for row in expected] == [row["staleness_mean"] for row in expected] == ages
    assert not collector_threads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_staleness", "changed"),
    [(1, {}), (2, {"lora": LORA}), (2, {"checkpoint_interval": 2, "problem_sampler": "uniform"})],
)
def test_a_pipelined_run_that_is_killed_goes_on_and_ends_bitwise_the_same(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(training.TrainingRun, "_save_if_due", once_all_is_collected(training.TrainingRun._save_if_due))
    options = pipelined(max_staleness, **changed)
    expected = run(options, start, tmp_path / "whole")
    for count in (2, 5):
        with monkeypatch.context() as patch:
            save = training.TrainingRun._save_if_due

            def dies(self: Any, count: int = count, save: Any = save) -> None:
                if self.iteration == count:
                    raise Killed
                save(self)

            patch.setattr(training.TrainingRun, "_save_if_due", dies)
            with pytest.raises(Killed):
                run(options, start, tmp_path / "killed")
        assert not collector_threads()
    assert run(options, start, tmp_path / "killed") == expected
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.slow
def test_a_roll_back_discards_what_the_abandoned_policy_wrote_and_is_the_same_every_time(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At iteration 4 with n = 2, once batches 5 and 6 are both ready, and once 5 is under way and 6 not begun."""
    alarm_at({4}, monkeypatch)
    options = pipelined(2, action="roll_back", max_rollbacks=1, checkpoint_interval=5)
    roll_back, collect = training.TrainingRun.roll_back, Collector.collect
    with monkeypatch.context() as patch:
        patch.setattr(training.TrainingRun, "roll_back", once_all_is_collected(roll_back))
        expected = run(options, start, tmp_path / "one")
    assert expected[3]["rolled_back_to"] == 2
    assert [row["staleness_max"] for row in expected] == [0, 1, 2, 2, 0, 1]
    is_rolling = threading.Event()

    def collect_5_while_rolling_back(self: Any, keys: list[EpisodeKey], *rest: Any) -> Any:
        if keys[0].draw == 5:
            assert is_rolling.wait(NOT_MORE)
        return collect(self, keys, *rest)

    def roll_back_during_5(self: Any, alarm: Any) -> str:
        threading.Timer(0.2, is_rolling.set).start()
        return roll_back(self, alarm)

    monkeypatch.setattr(Collector, "collect", collect_5_while_rolling_back)
    monkeypatch.setattr(training.TrainingRun, "roll_back", roll_back_during_5)
    assert run(options, start, tmp_path / "other") == expected
    assert result(tmp_path / "other") == result(tmp_path / "one")


@pytest.mark.slow
def test_the_mismatch_weight_is_the_trainers_policy_over_the_older_one_that_wrote_the_batch(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of iteration 4 with n = 2: `sampler_logp` is what snapshot 1 says of the tokens, `old_logp` what snapshot 3 does,
    so exp(old − sampler) is the importance weight between the two.
    """
    seen: dict[int, tuple[list[Group], torch.Tensor, torch.Tensor]] = {}
    step_metrics = training.GRPOTrainer._step_metrics

    def noted(self: Any, steps: Any, batches: Any) -> Any:
        old = torch.cat([batch.old_logp_M for batch in batches])
        sampler = torch.cat([batch.tensors.sampler_logp_M for batch in batches])
        seen[self.iteration] = (self.last_groups, old, sampler)
        return step_metrics(self, steps, batches)

    monkeypatch.setattr(training.GRPOTrainer, "_step_metrics", noted)
    options = pipelined(2, snapshot_interval=1, packing="none", temperature=1.0)
    rows = run(options, start, tmp_path)
    groups, old, sampler = seen[4]
    before, written_by = (
        tiny.collector(tmp_path / "output" / "snapshots" / f"step-000{number}").engine for number in (3, 1)
    )
    trajectories = [item for group in groups for item in group.trajectories]
    for engine, found in ((written_by, sampler), (before, old)):
        logp = engine.token_logp([item.token_ids for item in trajectories])
        expected = sorted(
            value
            for item, values in zip(trajectories, logp, strict=True)
            for value, is_sampled in zip(values, item.sampled_mask[1:], strict=True)
            if is_sampled
        )
        assert found.sort().values.tolist() == pytest.approx(expected, abs=1e-4)
    assert rows[0]["mismatch_max"] < 1e-4 < 0.01 < rows[3]["mismatch_max"]


@pytest.mark.slow
def test_with_a_learning_rate_of_zero_a_pipelined_run_trains_on_the_episodes_of_one_that_is_not(
    start: Path, tmp_path: Path
) -> None:
    """No weights move, so the age of a batch changes nothing: draws, random numbers and curriculum are the same."""
    added = {"staleness_mean", "staleness_max"}
    common = {"learning_rate": 0.0, "max_replacement_rounds": 1, "equal_groups": "drop"}
    rows = run(pipelined(2, **common), start, tmp_path / "ahead")
    expected = run(pipelined(0, **common), start, tmp_path / "on_policy")
    assert [{key: row[key] for key in row.keys() - added} for row in rows] == expected


@pytest.mark.slow
def test_an_environment_that_breaks_in_the_thread_ends_the_run_with_its_own_message(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_episode = Collector._open

    def breaks(self: Any, key: EpisodeKey, attempt: int) -> Any:
        if key.draw == 3:
            raise ValueError("the flight server is down; start it")
        return open_episode(self, key, attempt)

    monkeypatch.setattr(Collector, "_open", breaks)
    with pytest.raises(ValueError, match="the flight server is down; start it"):
        run(pipelined(), start, tmp_path)
    assert not collector_threads()
