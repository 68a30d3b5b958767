"""Iterations of the demo's own training, from its warm start, with a stopwatch on each part of them.

It is `TrainingRun` as the train stage runs it, with its problems and all of params.yaml; environment, reward, rollout,
checkpoints and snapshots are wrapped in clocks. What it writes lies on the disk the demo's results lie on.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from transformers import PreTrainedModel

from tasks.core import settings
from tasks.core.records import Group, Problem
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.learning.grpo.mini_batches import divide
from tasks.learning.shared.rows import Row
from tasks.stages.train import groups as grouping
from tasks.stages.train import run as training
from tasks.stages.train.settings import TrainSections
from tasks.tools.base import Environment, Episode
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper

WARM_UP, COUNTED = 2, 10  # iterations
T = TypeVar("T")


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds spent inside functions it wraps."""

    seconds: float = 0.0
    calls: int = 0

    def timing(self, function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> T:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return timed


class TimedEpisode(EpisodeWrapper):
    """An episode whose every answer is on the clock."""

    def __init__(self, episode: Episode, watch: Stopwatch):
        super().__init__(episode)
        self.call = watch.timing(episode.call)
        self.verdict = watch.timing(episode.verdict)


class TimedEnvironment(EnvironmentWrapper):
    """A world whose episodes are on the clock, from their start to their verdict."""

    def __init__(self, world: Environment, watch: Stopwatch):
        super().__init__(world)
        self._start, self._watch = watch.timing(world.start), watch

    def start(self, problem: Problem, *, stream: str = "") -> TimedEpisode:
        return TimedEpisode(self._start(problem, stream=stream), self._watch)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration: seconds of the whole without what it saved, of its rollout and of what the world did in it; the
    groups it played, and the rows of each that carried loss.
    """

    seconds: float
    rollout_seconds: float
    environment_seconds: float
    reward_seconds: float
    groups: Sequence[Group]
    rows: Sequence[Sequence[Row]]


@dataclass(slots=True)
class Watches:
    """One for each part of an iteration that is timed by itself."""

    environment: Stopwatch = field(default_factory=Stopwatch)
    reward: Stopwatch = field(default_factory=Stopwatch)
    rollout: Stopwatch = field(default_factory=Stopwatch)
    checkpoint: Stopwatch = field(default_factory=Stopwatch)
    snapshot: Stopwatch = field(default_factory=Stopwatch)

    def saved(self) -> float:
        return self.checkpoint.seconds + self.snapshot.seconds


@dataclass(frozen=True, slots=True)
class Played:
    """What was timed: the settings, the model as it stands at the end, the iterations, seconds of each kind of save."""

    settings: TrainSections
    model: PreTrainedModel
    iterations: Sequence[Iteration]
    checkpoint_seconds: float
    snapshot_seconds: float


def play(paths: Paths, params: dict[str, Any], *, num_threads: int) -> Played:
    """Train from the warm start for `WARM_UP` iterations off the clock and `COUNTED` on it."""
    chosen = settings.load(TrainSections, {**params, "compute": params["compute"] | {"num_threads": num_threads}})
    watches, iterations = Watches(), []
    with tempfile.TemporaryDirectory(dir=paths.artifacts) as folder, _clocked(watches):
        run = training.TrainingRun(
            chosen,
            start=paths.start_model,
            problems=read_split(paths, "train"),
            resume=Path(folder) / "resume",
        )
        run.collect = watches.rollout.timing(run.collect)
        run.checkpoints.save = watches.checkpoint.timing(run.checkpoints.save)  # type: ignore[method-assign]
        run.snapshots.save = watches.snapshot.timing(run.snapshots.save)  # type: ignore[method-assign]
        for number in range(WARM_UP + COUNTED):
            iteration = _iterate(run, watches)
            if number >= WARM_UP:
                iterations.append(iteration)
    return Played(
        chosen,
        run.trainer.model,
        iterations,
        watches.checkpoint.seconds / watches.checkpoint.calls,
        watches.snapshot.seconds / watches.snapshot.calls,
    )


@contextmanager
def _clocked(watches: Watches) -> Iterator[None]:
    """Inside, a training run's environment and reward are on the clock."""
    load = training.load_environment
    with (
        mock.patch.object(
            training, "load_environment", lambda options: TimedEnvironment(load(options), watches.environment)
        ),
        mock.patch.object(grouping, "reward", watches.reward.timing(grouping.reward)),
    ):
        yield


def _iterate(run: training.TrainingRun, watches: Watches) -> Iteration:
    parts = (watches.rollout, watches.environment, watches.reward)
    before, saved, start = [watch.seconds for watch in parts], watches.saved(), time.perf_counter()
    _, alarm = run.iterate()
    seconds = time.perf_counter() - start - (watches.saved() - saved)
    assert alarm is None, alarm
    groups = run.trainer.last_groups
    rollout, environment, reward = (watch.seconds - then for watch, then in zip(parts, before, strict=True))
    with_loss, _ = divide(groups, run.trainer.settings, iteration=run.iteration)
    return Iteration(seconds, rollout, environment, reward, groups, [group.rows for group in with_loss])


def shares(played: Played) -> dict[str, Any]:
    """Shares of an iteration's time: the world's and the reward's in it, and what checkpoints and snapshots add at the
    run's own intervals. Iterations are compared by their sums, the parts of one with the whole of it.
    """
    options, iterations = played.settings.train, played.iterations
    total = sum(item.seconds for item in iterations)
    mean = total / len(iterations)
    environment = sum(item.environment_seconds for item in iterations)
    reward = sum(item.reward_seconds for item in iterations)
    return {
        "iterations": len(iterations),
        "iteration_seconds": [item.seconds for item in iterations],
        "iteration_seconds_median": statistics.median(item.seconds for item in iterations),
        "rollout_share": sum(item.rollout_seconds for item in iterations) / total,
        "environment_share": (environment + reward) / total,
        "environment_seconds": environment / len(iterations),
        "reward_seconds": reward / len(iterations),
        "checkpoint_seconds": played.checkpoint_seconds,
        "checkpoint_interval": options.checkpoint_interval,
        "checkpoint_share": played.checkpoint_seconds / options.checkpoint_interval / mean,
        "snapshot_seconds": played.snapshot_seconds,
        "snapshot_interval": options.snapshot_interval,
        "snapshot_share": played.snapshot_seconds / options.snapshot_interval / mean,
    }
