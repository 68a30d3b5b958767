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
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from tasks.chat.format import load_chat
from tasks.core.files import write_json
from tasks.core.records import Problem
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.models.folders import load_model
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tests.benchmarks.demo import demo_artifacts, demo_params
from tests.benchmarks.generate_engine import GenerateEngine
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import Target, new_table
from tests.engine_benches import vllm_settings

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
EPISODES = {1: 8, 16: 48, 64: 128, 256: 256}  # played at each concurrency
ROUNDS = 2  # the best counts, since the machine is shared
PAIRS = 11  # plays of generate and of the in-process engine in turns, whose ratio is the target's
NUM_ITERATIONS = 6  # the first starts vLLM's kernels and does not count
AT = 64
GENERATE = "transformers generate, a turn"
TARGET = Target("in_process_vs_generate", f"in process against generate a turn, {AT} episodes", 5.0)

Row = dict[str, Any]


@pytest.fixture(scope="module")
def paths() -> Paths:
    return demo_artifacts()


@pytest.fixture(scope="module")
def settings(paths: Paths) -> TrainSections:
    params = demo_params()
    return TrainSections.model_validate({name: params[name] for name in TrainSections.model_fields})


def with_vllm(settings: TrainSections, folder: Path, mode: str) -> EngineSettings:
    vllm = vllm_settings(folder, mode=mode)
    return settings.engine.model_copy(
        update={"name": "vllm", "settings": vllm, "max_concurrent_episodes": max(EPISODES)}
    )


def engines(settings: TrainSections, snapshot: Path, folder: Path) -> dict[str, Callable[[], Engine]]:
    """Each by its name in the table; started when it is called for, and closed before the next."""
    chat, sampling = load_chat(snapshot), settings.sampling

    def generate() -> Engine:
        model = load_model(snapshot, compute=settings.compute)
        return GenerateEngine(
            model, end_of_turn=chat.end_of_turn, temperature=sampling.temperature, top_p=sampling.top_p
        )

    def loaded(engine: EngineSettings) -> Callable[[], Engine]:
        return lambda: load_engine(snapshot, chat, engine=engine, sampling=sampling, compute=settings.compute)

    return {
        GENERATE: generate,
        "in process": loaded(settings.engine),
        "vllm offline": loaded(with_vllm(settings, folder, "in_process")),
        "vllm server": loaded(with_vllm(settings, folder, "server")),
    }


class Player:
    """Plays the same problems with an engine, at some number of episodes at once."""

    def __init__(self, settings: TrainSections, snapshot: Path, problems: list[Problem]):
        self.settings, self.chat = settings, load_chat(snapshot)
        self.keys = [EpisodeKey(problem, 0, 0) for problem in problems]

    def play(self, engine: Engine, concurrency: int) -> tuple[float, float]:
        """Generated tokens and episodes a second."""
        with closing(load_environment(self.settings.environment)) as environment:
            collector = Collector(
                EngineEpisodes(engine, self.chat, self.settings.sampling),
                environment,
                max_concurrent_episodes=concurrency,
                seed=self.settings.seed,
                stage="bench",
            )
            start = time.perf_counter()
            played = collector.collect(self.keys[: EPISODES[concurrency]])
            seconds = time.perf_counter() - start
        return sum(trajectory.num_sampled_tokens for trajectory in played) / seconds, len(played) / seconds

    def measured(self, name: str, engine: Engine) -> Iterator[Row]:
        """A row a concurrency, the best of some rounds; a first round nobody times warms up."""
        for concurrency in EPISODES:
            self.play(engine, concurrency)
            tokens_per_second, episodes_per_second = max(self.play(engine, concurrency) for _ in range(ROUNDS))
            yield {
                "engine": name, "concurrency": concurrency, "tokens_per_second": tokens_per_second,
                "episodes_per_second": episodes_per_second,
            }  # fmt: skip

    def ratios(self, engine: Engine, other: Engine) -> list[float]:
        """How many times as fast an engine is as another, by pairs of plays that follow each other."""
        for one in (engine, other):
            self.play(one, AT)
        return sorted(self.play(engine, AT)[0] / self.play(other, AT)[0] for _ in range(PAIRS))


@contextmanager
def training(settings: TrainSections, paths: Paths, folder: Path) -> Iterator[TrainingRun]:
    run = TrainingRun(settings, start=paths.start_model, problems=read_split(paths, "train"), resume=folder)
    try:
        yield run
    finally:
        run.close()


def refresh_figures(settings: TrainSections, paths: Paths, folder: Path) -> dict[str, float]:
    """Of an iteration of the demo with vLLM offline: seconds of refresh and probe, and their share."""
    with_engine = settings.model_copy(update={"engine": with_vllm(settings, folder, "in_process")})
    rows = []
    with training(with_engine, paths, folder / "resume") as run:
        for _ in range(NUM_ITERATIONS):
            start = time.perf_counter()
            metrics, _ = run.iterate()
            rows.append({**metrics, "seconds": time.perf_counter() - start})
    counted = rows[1:]
    names = ("refresh_seconds", "probe_seconds", "seconds", "prefix_cache_hit_rate")
    refresh, probe, seconds, hit_rate = (median(row[name] for row in counted) for name in names)
    return {
        "refresh_seconds": refresh, "probe_seconds": probe, "iteration_seconds": seconds,
        "share_of_iteration": (refresh + probe) / seconds, "prefix_cache_hit_rate": hit_rate,
    }  # fmt: skip


def test_the_in_process_engine_is_faster_than_generate_a_turn(
    paths: Paths, settings: TrainSections, tmp_path: Path
) -> None:
    snapshot = sorted((paths.stage("train") / "snapshots").iterdir())[-1]
    player = Player(settings, snapshot, read_split(paths, "select"))
    start = engines(settings, snapshot, tmp_path)
    with closing(start["in process"]()) as engine, closing(start[GENERATE]()) as other:
        ratios = player.ratios(engine, other)
    rows: list[Row] = []
    for name in start:
        with closing(start[name]()) as engine:
            rows += player.measured(name, engine)
    rate = {(row["engine"], row["concurrency"]): row["tokens_per_second"] for row in rows}
    ratio = median(ratios)
    figures = {
        "rows": rows, "in_process_vs_generate": ratio, "in_process_vs_generate_pairs": ratios,
        **refresh_figures(settings, paths, tmp_path),
    }  # fmt: skip
    machine = {"cpu": cpu_model(), "num_threads": settings.compute.num_threads}
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
    pairs = figures["in_process_vs_generate_pairs"]
    console.print(f"the middle of {len(pairs)} pairs of plays in turns, {pairs[0]:.2f} to {pairs[-1]:.2f}")
    console.print(
        f"refresh {figures['refresh_seconds'] * 1000:.0f} ms, probe {figures['probe_seconds'] * 1000:.0f} ms: "
        f"{figures['share_of_iteration']:.1%} of an iteration ({figures['iteration_seconds']:.2f} s), "
        f"prefix cache {figures['prefix_cache_hit_rate']:.0%}"
    )
