"""train: GRPO from the warm start, with reward 1 for a solved problem and 0 otherwise.

Takes the train problems and the warm-started model; leaves a snapshot every `train.snapshot_interval` iterations and
one line of metrics an iteration. The trainer is handed a `collect` callable, so it never sees an environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.environments.catalog import EnvironmentSettings, load_environment
from tasks.learning.options import GRPOSettings
from tasks.problems import read_split
from tasks.records import Group, Problem
from tasks.rewards.outcome import outcome_reward
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import atomic_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.learning.curriculum import ProblemSampler
    from tasks.rollouts.collect import Collector


class TrainSettings(Settings):
    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    train: GRPOSettings


SETTINGS = TrainSettings


def run(settings: TrainSettings, paths: Paths) -> None:
    from tasks.learning.curriculum import ProblemSampler
    from tasks.learning.trainer import GRPOTrainer
    from tasks.models import load_model, save_snapshot
    from tasks.progress import progress_bar
    from tasks.rollouts.chat import load_chat
    from tasks.rollouts.collect import Collector
    from tasks.rollouts.load import load_engine
    from tasks.tracking.metrics import live_logger

    options = settings.train
    start = paths.stage("warm_start") / "model"
    model, chat = load_model(start, num_threads=settings.num_threads), load_chat(start)
    collector = Collector(
        load_engine(model, chat, engine=settings.engine, sampling=settings.sampling),
        chat,
        load_environment(settings.environment),
        sampling=settings.sampling,
        max_concurrent_episodes=settings.engine.max_concurrent_episodes,
        seed=settings.seed,
        stage="train",
    )
    sampler = ProblemSampler(read_split(paths, "train"), options, seed=settings.seed)
    trainer = GRPOTrainer(model, options, temperature=settings.sampling.temperature)
    collect = group_collector(collector, sampler, group_size=options.group_size)
    log = live_logger(os.environ)  # the flow hands over an MLflow run; by hand and under DVC alone there is none
    metrics: list[dict[str, Any]] = []
    with atomic_folder(paths.stage("train")) as folder, progress_bar("train", total=options.num_iterations) as bar:
        for iteration in range(1, options.num_iterations + 1):
            row = trainer.iterate(collect)
            metrics.append({**row, "success_by_category": dict(sampler.success)})
            bar.advance(_detail(row))
            if log is not None:
                log(metrics[-1])
            if iteration % options.snapshot_interval == 0 or iteration == options.num_iterations:
                save_snapshot(folder / "snapshots" / f"step-{iteration:04d}", model, chat.tokenizer)
        write_jsonl(folder / "metrics.jsonl", metrics)


def group_collector(
    collector: Collector, sampler: ProblemSampler, *, group_size: int
) -> Callable[[int], Sequence[Group]]:
    """The callable the trainer gets: draw problems, play each `group_size` times, score, and tell the sampler."""
    from tasks.rollouts.episode import EpisodeKey

    def collect(iteration: int) -> list[Group]:
        problems = sampler.draw(iteration)
        keys = [EpisodeKey(problem, iteration, sample) for problem in problems for sample in range(group_size)]
        collector.engine.policy_version = iteration - 1
        trajectories = collector.collect(keys)
        groups = [
            _group(problem, trajectories[number * group_size : (number + 1) * group_size])
            for number, problem in enumerate(problems)
        ]
        groups = [group for group in groups if group.trajectories]
        sampler.learn(groups)
        return groups

    return collect


def _group(problem: Problem, trajectories: Sequence[Any]) -> Group:
    """Episodes lost to a fault of the environment are dropped here: they are never rewarded."""
    kept = [trajectory for trajectory in trajectories if trajectory.outcome != "environment_error"]
    return Group(problem.id, problem.category, kept, [outcome_reward(problem, trajectory) for trajectory in kept])


def _detail(row: dict[str, Any]) -> str:
    return (
        f"success {row['success_rate']:.2f}  tokens {row['mean_sampled_tokens']:.0f}  "
        f"kl {row.get('kl', 0.0):.3f}  signal {row['signal_share']:.2f}"
    )
