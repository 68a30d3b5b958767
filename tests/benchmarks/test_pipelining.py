"""Seconds an iteration where tools are slow, with rollouts before the update and beside it; one thread each.

Every turn of an untrained model is made a call to a tool that takes 50 ms. With `max_staleness: 1` an iteration
cannot be shorter than the longer of rollout and update; the promise is that it is shorter than both together. Wants two
cores to itself. Writes artifacts/bench/pipelining.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core import background
from tasks.core.files import write_json
from tasks.core.records import Problem, ToolCall
from tasks.environments.catalog import load_environment
from tasks.stages.train import groups as grouping
from tasks.stages.train import run as training
from tasks.tools.base import Answer, Episode, ToolReply
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper
from tests import tiny
from tests.conftest import ROOT
from tests.stages.train.test_training import settings

pytestmark = pytest.mark.bench
LATENCY_SECONDS, WARM_UP, COUNTED, ROUNDS = 0.05, 2, 8, 2
SIZE = {"problems_per_iteration": 4, "group_size": 8, "max_turns": 8, "max_tokens_per_turn": 6, "updates_per_batch": 4}


class LateEpisode(EpisodeWrapper):
    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return background.run(self._late())

    async def _late(self) -> ToolReply:
        await asyncio.sleep(LATENCY_SECONDS)
        return ToolReply("ok")


class LateWorld(EnvironmentWrapper):
    """A world all of whose calls wait."""

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return LateEpisode(self.inner.start(problem, stream=stream))


@pytest.fixture(autouse=True)
def _every_turn_is_a_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "reward", tiny.reward_of_any_text)
    monkeypatch.setattr(training, "load_environment", lambda settings: LateWorld(load_environment(settings)))
    monkeypatch.setattr(ChatFormat, "calls", lambda self, text, tools: [ToolCall(name="search_flights", arguments={})])


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = function(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return found

    return call


def seconds_of(start: Path, place: Path, max_staleness: int) -> dict[str, float]:
    """Medians over the iterations: a whole one, and the rollout in it."""
    options = settings(
        **SIZE, max_staleness=max_staleness, importance_correction="token_truncate", num_iterations=WARM_UP + COUNTED,
        checkpoint_interval=100, snapshot_interval=100, kl_weight=0.0, reference_interval=None,
    )  # fmt: skip
    run = training.TrainingRun(options, start=start, problems=tiny.problems(40), resume=place)
    rollouts: list[float] = []
    iterations: list[float] = []
    run.collector.collect = timed(run.collector.collect, rollouts)  # type: ignore[method-assign]
    iterate = timed(run.iterate, iterations)
    for _ in range(WARM_UP + COUNTED):
        iterate()
    run.close()
    # The last iterations of a pipelined run have nothing left to collect: the thread is done.
    counted = slice(WARM_UP, WARM_UP + COUNTED - 2)
    return {"iteration_seconds": median(iterations[counted]), "rollout_seconds": median(rollouts[counted])}


def best(start: Path, place: Path, max_staleness: int) -> dict[str, float]:
    """Of two rounds, since the machine is shared."""
    rounds = [seconds_of(start, place / str(number), max_staleness) for number in range(ROUNDS)]
    return min(rounds, key=lambda row: row["iteration_seconds"])


def test_a_pipelined_iteration_is_shorter_than_rollout_and_update_together(tmp_path: Path) -> None:
    start = tiny.model_folder(tmp_path / "m")
    in_turn, beside = (best(start, tmp_path / str(number), number) for number in (0, 1))
    rollout = in_turn["rollout_seconds"]
    update = in_turn["iteration_seconds"] - rollout
    row = {
        "latency_seconds": LATENCY_SECONDS,
        "episodes": SIZE["problems_per_iteration"] * SIZE["group_size"],
        "rollout_seconds": rollout,
        "update_seconds": update,
        "in_turn_seconds": in_turn["iteration_seconds"],
        "pipelined_seconds": beside["iteration_seconds"],
        "pipelined_rollout_seconds": beside["rollout_seconds"],
        "bound_seconds": max(rollout, update),
    }
    write_json(ROOT / "artifacts" / "bench" / "pipelining.json", row)
    print(f"\nrollout {rollout:6.3f} s   update {update:6.3f} s")
    print(f"in turn (max_staleness 0)    {row['in_turn_seconds']:6.3f} s an iteration")
    print(f"pipelined (max_staleness 1)  {row['pipelined_seconds']:6.3f} s an iteration")
    print(f"the longer of the two        {row['bound_seconds']:6.3f} s")
    assert row["pipelined_seconds"] < row["in_turn_seconds"]
