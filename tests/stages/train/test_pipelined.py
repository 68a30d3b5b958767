"""Whole runs with rollouts ahead of the trainer: the same whatever the timing; kills, roll-backs, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.files import content_hash
from tasks.core.records import Group
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.rollouts import episode
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine_clock import EngineClock
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.stages.train import run as training
from tasks.stages.train.collect_ahead import Batch
from tests import tiny
from tests.stages.train.test_training import LORA, PROBLEMS, Killed, alarm_at, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("earnable")]

NOT_MORE = 120  # seconds; what a test waits for at most


def pipelined(max_staleness: int = 1, **changed: Any) -> Any:
    adaptive = {"problem_sampler": "adaptive", "importance_correction": "token_truncate"}
    return settings(**{**adaptive, "max_staleness": max_staleness, **changed})


def result(place: Path, *, last: str = "iteration-000006") -> tuple[str, str]:
    return content_hash(place / "output"), content_hash(place / "resume" / last)


def late(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return call


def once_all_is_collected(method: Callable[..., Any]) -> Callable[..., Any]:
    """The collector is as far ahead as it can be."""

    def call(run: training.TrainingRun, *arguments: Any, **options: Any) -> Any:
        assert run.pipeline is not None
        while run.pipeline.num_open > run.pipeline.collected.qsize():
            time.sleep(0.002)
        return method(run, *arguments, **options)

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
    build_pipeline = training.TrainingRun._build_pipeline

    def build_with_late_serve(self: Any) -> Any:
        """The trainer's weights are then others than those that are to be served."""
        pipeline = build_pipeline(self)
        serve = pipeline.serve

        def serve_after_a_step(weights: Any, version: int) -> None:
            deadline = time.monotonic() + 1
            while self.trainer.optimizer.steps_done <= version * 2 and time.monotonic() < deadline:
                time.sleep(0.002)
            serve(weights, version)

        pipeline.serve = serve_after_a_step
        return pipeline

    sides = {
        "trainer": (GRPOTrainer, "_optimizer_step", late(GRPOTrainer._optimizer_step, 0.2)),
        "collector": (Collector, "collect", late(Collector.collect, 0.2)),
        "refresh": (training.TrainingRun, "_build_pipeline", build_with_late_serve),
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
    [(1, {}), (2, {"lora": LORA}), (2, {"checkpoint_interval": 2, "problem_sampler": "band"})],
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

            def dies(self: Any, count: int = count, save: Any = save, **options: Any) -> None:
                if self.iteration == count:
                    raise Killed
                save(self, **options)

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
    step_metrics = GRPOTrainer._step_metrics

    def noted(self: Any, steps: Any, batches: Any) -> Any:
        old = torch.cat([batch.old_logp_M for batch in batches])
        sampler = torch.cat([batch.tensors.sampler_logp_M for batch in batches])
        seen[self.iteration] = (self.last_groups, old, sampler)
        return step_metrics(self, steps, batches)

    monkeypatch.setattr(GRPOTrainer, "_step_metrics", noted)
    options = pipelined(2, snapshot_interval=1, packing="none", temperature=1.0)
    rows = run(options, start, tmp_path)
    groups, old, sampler = seen[4]
    before, written_by = (
        tiny.engine(tmp_path / "output" / "snapshots" / f"iteration-000{number}") for number in (3, 1)
    )
    trajectories = [item for group in groups for item in group.trajectories]
    for engine, found in ((written_by, sampler), (before, old)):
        logp = engine.token_logp([item.sequences[0].token_ids for item in trajectories])
        expected = sorted(
            value
            for item, values in zip(trajectories, logp, strict=True)
            for value, is_sampled in zip(values, item.sequences[0].sampled_mask[1:], strict=True)
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
    common = {"learning_rate": 0.0, "max_replacement_rounds": 1, "zero_variance_groups": "drop"}
    rows = run(pipelined(2, **common), start, tmp_path / "ahead")
    expected = run(pipelined(0, **common), start, tmp_path / "on_policy")
    assert [{key: row[key] for key in row.keys() - added} for row in rows] == expected


@pytest.mark.slow
def test_what_a_checkpoint_waits_for_is_idle_time_of_the_trainer_and_polls_alone_are_work_of_the_engine(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By clocks that stand: a batch takes 5 s to come, the engine's polls take none."""
    moment = 0.0
    monkeypatch.setattr(episode, "EngineClock", partial(EngineClock, now=lambda: 0.0))
    options = pipelined(1, num_iterations=2, checkpoint_interval=1)
    with closing(training.TrainingRun(options, start=start, problems=PROBLEMS, resume=tmp_path / "resume")) as one:
        assert one.pipeline is not None
        batches_ahead = one.pipeline.batches_ahead

        def slow(version: int) -> list[Batch]:
            nonlocal moment
            moment += 5.0
            return batches_ahead(version)

        one.pipeline.batches_ahead = slow  # type: ignore[method-assign]
        one.stopwatch.now = lambda: moment
        one.iterate()
        (row,) = one.stopwatch.rows()
    assert (row["iteration_seconds"], row["save_seconds"], row["update_seconds"]) == (5.0, 0.0, 0.0)
    assert (row["trainer_idle_seconds"], row["engine_idle_seconds"]) == (5.0, 5.0)


@pytest.mark.slow
def test_an_environment_that_breaks_in_the_thread_ends_the_run_with_its_own_message(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_episode = EngineEpisodes.open

    def breaks(self: Any, key: EpisodeKey, *arguments: Any, **named: Any) -> Any:
        if key.draw == 3:
            raise ValueError("the flight server is down; start it")
        return open_episode(self, key, *arguments, **named)

    monkeypatch.setattr(EngineEpisodes, "open", breaks)
    with pytest.raises(ValueError, match="the flight server is down; start it"):
        run(pipelined(), start, tmp_path)
    assert not collector_threads()
