"""Three ways of collecting where tools take 50 to 500 ms: in turn, a batch ahead, and groups that stream.

`python -m tests.benchmarks.streaming FOLDER SEED…` prints one line of JSON per way and seed: the test profile, each
seed from one warm start. A folder that has a seed's warm start is used again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from tasks.core import background
from tasks.core.records import Problem
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.stages.train import run as training
from tasks.stages.train.settings import TrainSections
from tasks.tools.base import Answer, Episode, ToolReply
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper
from tests.benchmarks.exploration import params_of
from tests.benchmarks.warm_starts import prepare, train_one

LATENCY_SECONDS = 0.05, 0.5
# At the profile's 3e-3 the sentinel stops seeds 1 and 2, by KL and by entropy: stale batches want smaller steps.
SOUND = {"learning_rate": 1.0e-3, "kl_weight": 0.01}
SIZE = {"problems_per_iteration": 8, "group_size": 8, "checkpoint_interval": 100, "snapshot_interval": 100}
CORRECTED = {"importance_correction": "token_truncate"}
WAYS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "max_staleness: 1": {**CORRECTED, "max_staleness": 1},
    "streaming": {
        **CORRECTED,
        "max_staleness": 4,
        "streaming": {"groups_under_way": 16, "batch_deadline_seconds": None, "least_batch_share": 0.5},
    },
}


class SlowEpisode(EpisodeWrapper):
    """Each call takes a time of its own, drawn from the episode's stream."""

    def __init__(self, inner: Episode, rng: random.Random):
        super().__init__(inner)
        self.rng = rng

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        answer = self.inner.call(name, arguments)
        assert isinstance(answer, ToolReply)
        return background.run(_late(answer, self.rng.uniform(*LATENCY_SECONDS)))


async def _late(reply: ToolReply, seconds: float) -> ToolReply:
    await asyncio.sleep(seconds)
    return reply


class SlowWorld(EnvironmentWrapper):
    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return SlowEpisode(self.inner.start(problem, stream=stream), random.Random(f"{problem.id}/{stream}"))


def start_model(folder: Path, seed: int) -> Paths:
    paths = Paths(folder / str(seed))
    if not (paths.start_model).exists():
        prepare(params_of(seed), paths)
        train_one(params_of(seed), paths)
    return paths


def train(way: str, paths: Paths, seed: int, *, num_iterations: int) -> dict[str, Any]:
    """Success in the first and last quarter, and what an iteration took and waited, over all but the ends: the first
    two fill the pipeline, and in the last three nothing is left to begin.
    """
    params = params_of(seed)
    params["train"] |= {**SIZE, **SOUND, "num_iterations": num_iterations, **WAYS[way]}
    settings, place = load(TrainSections, params), paths.artifacts / "ways" / f"{way}-{time.time_ns()}"
    rows, quarter = [], num_iterations // 4
    load_before, processor_before = os.getloadavg()[0], time.process_time()
    with patch.object(training, "load_environment", lambda options: SlowWorld(load_environment(options))):
        run = training.TrainingRun(settings, start=paths.start_model, problems=read_split(paths, "train"), resume=place)
    with closing(run):
        for _ in range(num_iterations):
            row, alarm = run.iterate()
            assert alarm is None, alarm
            rows.append(row)
        seconds = run.stopwatch.rows()
    counted = seconds[2:-3]
    return {
        "way": way,
        "seed": seed,
        "first_quarter": fmean(row["success_rate"] for row in rows[:quarter]),
        "last_quarter": fmean(row["success_rate"] for row in rows[-quarter:]),
        "load": (load_before + os.getloadavg()[0]) / 2,
        "processor_seconds": time.process_time() - processor_before,
        "seconds": sum(row["iteration_seconds"] for row in seconds),
        **{
            name: fmean(row[name] for row in counted)
            for name in ("iteration_seconds", "trainer_idle_seconds", "engine_idle_seconds", "update_seconds")
        },
        "staleness_mean": fmean(row.get("staleness_mean", 0.0) for row in rows),
        "staleness_max": max(row.get("staleness_max", 0) for row in rows),
        "stale_token_share": fmean(row.get("stale_token_share", 0.0) for row in rows),
    }


def measure(folder: Path, seed: int, *, num_iterations: int = 48) -> Iterator[dict[str, Any]]:
    paths = start_model(folder, seed)
    for way in WAYS:
        yield train(way, paths, seed, num_iterations=num_iterations)


if __name__ == "__main__":
    for given in map(int, sys.argv[2:]):
        for found in measure(Path(sys.argv[1]), given):
            print(json.dumps(found), flush=True)
