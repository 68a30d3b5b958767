"""Engines side by side: the same weights, the same problems of travel_desk, one run.

transformers' `generate` a turn, the in-process engine, vLLM offline and a vLLM server, at 1 to 256 episodes at once;
then what a refresh of the weights and the probe after it cost of an iteration. The target: the in-process engine is at
least 5 times as fast as `generate` a turn at 64 episodes. Writes artifacts/bench/engines.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks.environments.catalog import load_environment
from tasks.models import load_model
from tasks.problems import read_split
from tasks.records import Problem
from tasks.rollouts.chat import load_chat
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.options import EngineSettings
from tasks.settings import Paths
from tasks.storage import write_json
from tasks.train import TrainSettings
from tasks.training import TrainingRun
from tests.benchmarks.demo import demo_artifacts, demo_params
from tests.benchmarks.generate_engine import GenerateEngine
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import Target, new_table
from tests.engines import vllm_settings

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
EPISODES = {1: 8, 16: 48, 64: 128, 256: 256}  # played at each concurrency
ROUNDS = 2  # the best counts, since the machine is shared
NUM_ITERATIONS = 4  # the first starts vLLM's kernels and does not count
AT = 64
TARGET = Target("in_process_vs_generate", f"in process against generate a turn, {AT} episodes", 5.0)

Row = dict[str, Any]


@pytest.fixture(scope="module")
def paths() -> Paths:
    return demo_artifacts()


@pytest.fixture(scope="module")
def settings(paths: Paths) -> TrainSettings:
    params = demo_params()
    return TrainSettings.model_validate({name: params[name] for name in TrainSettings.model_fields})


def with_vllm(settings: TrainSettings, folder: Path, mode: str) -> EngineSettings:
    vllm = vllm_settings(folder, mode=mode)
    return settings.engine.model_copy(update={"name": "vllm", "vllm": vllm, "max_concurrent_episodes": max(EPISODES)})


def engines(settings: TrainSettings, snapshot: Path, folder: Path) -> dict[str, Callable[[], Engine]]:
    """Each by its name in the table; started when it is called for, and closed before the next."""
    chat, sampling = load_chat(snapshot), settings.sampling

    def generate() -> Engine:
        model = load_model(snapshot, num_threads=settings.num_threads)
        return GenerateEngine(
            model, end_of_turn=chat.end_of_turn, temperature=sampling.temperature, top_p=sampling.top_p
        )

    def loaded(engine: EngineSettings) -> Callable[[], Engine]:
        return lambda: load_engine(snapshot, chat, engine=engine, sampling=sampling, num_threads=settings.num_threads)

    return {
        "transformers generate, a turn": generate,
        "in process": loaded(settings.engine),
        "vllm offline": loaded(with_vllm(settings, folder, "in_process")),
        "vllm server": loaded(with_vllm(settings, folder, "server")),
    }


def measured(
    name: str, engine: Engine, settings: TrainSettings, snapshot: Path, problems: list[Problem]
) -> Iterator[Row]:
    """A row a concurrency, the best of some rounds on the same problems; a first round nobody times warms up."""
    with closing(load_environment(settings.environment)) as environment:
        for concurrency, num_episodes in EPISODES.items():
            collector = Collector(
                engine, load_chat(snapshot), environment, sampling=settings.sampling,
                max_concurrent_episodes=concurrency, seed=settings.seed, stage="bench",
            )  # fmt: skip
            keys = [EpisodeKey(problem, 0, 0) for problem in problems[:num_episodes]]
            collector.collect(keys[: min(concurrency, num_episodes)])
            rates = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                played = collector.collect(keys)
                seconds = time.perf_counter() - start
                tokens = sum(trajectory.num_sampled_tokens for trajectory in played)
                rates.append((tokens / seconds, len(played) / seconds))
            tokens_per_second, episodes_per_second = max(rates)
            yield {
                "engine": name, "concurrency": concurrency, "tokens_per_second": tokens_per_second,
                "episodes_per_second": episodes_per_second,
            }  # fmt: skip


@contextmanager
def training(settings: TrainSettings, paths: Paths, folder: Path) -> Iterator[TrainingRun]:
    run = TrainingRun(
        settings, start=paths.stage("warm_start") / "model", problems=read_split(paths, "train"), resume=folder
    )
    try:
        yield run
    finally:
        run.close()


def refresh_figures(settings: TrainSettings, paths: Paths, folder: Path) -> dict[str, float]:
    """Of an iteration of the demo with vLLM offline: seconds of refresh and probe, and their share."""
    with_engine = settings.model_copy(update={"engine": with_vllm(settings, folder, "in_process")})
    rows = []
    with training(with_engine, paths, folder / "resume") as run:
        for _ in range(NUM_ITERATIONS):
            start = time.perf_counter()
            metrics, _ = run.iterate()
            rows.append({**metrics, "seconds": time.perf_counter() - start})
    counted = rows[1:]
    figures = {name: sum(row[name] for row in counted) / len(counted) for name in ("refresh_seconds", "probe_seconds")}
    seconds = sum(row["seconds"] for row in counted) / len(counted)
    hit_rate = sum(row["prefix_cache_hit_rate"] for row in counted) / len(counted)
    share = sum(figures.values()) / seconds
    return {**figures, "iteration_seconds": seconds, "share_of_iteration": share, "prefix_cache_hit_rate": hit_rate}


def test_the_in_process_engine_is_faster_than_generate_a_turn(
    paths: Paths, settings: TrainSettings, tmp_path: Path
) -> None:
    snapshot = sorted((paths.stage("train") / "snapshots").iterdir())[-1]
    problems = read_split(paths, "select")
    rows: list[Row] = []
    for name, start in engines(settings, snapshot, tmp_path).items():
        with closing(start()) as engine:
            rows += measured(name, engine, settings, snapshot, problems)
    rate = {(row["engine"], row["concurrency"]): row["tokens_per_second"] for row in rows}
    ratio = rate["in process", AT] / rate["transformers generate, a turn", AT]
    figures = {"rows": rows, "in_process_vs_generate": ratio, **refresh_figures(settings, paths, tmp_path)}
    machine = {"cpu": cpu_model(), "num_threads": settings.num_threads}
    write_json(paths.artifacts / "bench" / "engines.json", {**figures, "machine": machine})
    show(figures, rate)
    assert ratio > 1


def show(figures: dict[str, Any], rate: dict[tuple[str, int], float]) -> None:
    console = Console(width=100)
    table = new_table("Generated tokens a second", *(f"{number} episodes" for number in EPISODES))
    for name in dict.fromkeys(name for name, _ in rate):
        table.add_row(name, *(f"{rate[name, number]:,.0f}" for number in EPISODES))
    console.print(table)
    targets = new_table("Engines", "target", "figure", "")
    targets.add_row(*TARGET.row(figures["in_process_vs_generate"]))
    console.print(targets)
    console.print(
        f"refresh {figures['refresh_seconds'] * 1000:.0f} ms, probe {figures['probe_seconds'] * 1000:.0f} ms: "
        f"{figures['share_of_iteration']:.1%} of an iteration ({figures['iteration_seconds']:.2f} s), "
        f"prefix cache {figures['prefix_cache_hit_rate']:.0%}"
    )
