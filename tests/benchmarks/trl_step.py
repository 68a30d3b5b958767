"""One GRPO batch of turnwise against one of TRL 1.16's `GRPOTrainer` with `environment_factory`: same world, weights,
problems, numbers, threads, process.

A batch is everything from problems to new weights: rollout, log-probs, rewards, losses, its updates. Both train from
the same folder on the same problems in the same order, one batch of each in turn, so that a busy machine slows both.
Sampled tokens cannot be forced to be the same ones (TRL draws from torch's global generator), so the ratio is of
seconds a sampled token; counts, and the ratio of plain seconds, stand beside it.

What was done for TRL:
- The best of what was tried, with the demo's warm start on one thread, a batch: micro-batches of 8 to 128 rows are
  alike within the noise (5.7 to 5.9 s), static instead of dynamic KV cache 6.5, transformers' continuous batching 46
  tuned and 139 by default (its paged cache is made for CUDA). vLLM on neither side: both generate in process.
- float32, no gradient checkpointing (TRL's default is on), no logging, checkpoint or progress bar, fused AdamW as here.
  `mallopt` is a property of the process, so TRL gains by turnwise's (`tasks/models/torch_setup.py`); torch's
  deterministic mode, which turnwise pays for, is off while TRL's clock runs.
- Its per-turn budget: `generate` stops at `max_tokens_per_turn` through `generation_kwargs`; otherwise one rambling row
  would hold up 127 others for the length of an episode.
- Bad arguments get the world's own short reply; TRL's would be a Python error of a hundred tokens.
What was done for equal work: groups of equal reward stay in turnwise's batch (`zero_variance_groups: keep`) as in
TRL's, both hold a reference for KL and neither moves it. TRL computes the old log-probs in a forward of its own;
turnwise notes them in the first step's, which is part of what is compared. What stays different: TRL ends an episode at
a malformed call where turnwise lets the agent try again, and its budget for an episode leaves the prompt out;
`success_rate` and `tokens_an_episode` show how much that matters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.chat.format import load_chat
from tasks.core.files import read_jsonl
from tasks.core.records import Problem
from tasks.environments.catalog import load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rewards.settings import RewardSettings
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tasks.stages.train.groups import group_collector
from tests.benchmarks.demo import demo_params
from tests.benchmarks.trl_trainer import Batch, their_batches

THEIR_ROWS = 32  # of one forward of the demo's model
UNMEASURED = 1  # batches before the clock counts


def measure(
    model_folder: Path, problems: Sequence[Problem], params: dict[str, Any], *, num_threads: int, rounds: int
) -> dict[str, Any]:
    """Batches of both from the same weights in turn, `rounds` counted after one that is not; `params` are params.yaml.

    `trl_step_ratio` is how many times longer TRL takes for a sampled token, a ratio of medians over the rounds, where
    both do equal work. `turnwise_dropping` is a third run with groups of equal reward dropped, as the demo has it.
    """
    settings = grpo_settings(params, rounds)
    dropping = settings.model_copy(update={"zero_variance_groups": "drop"})
    trl, turnwise, turnwise_dropping = in_turn(
        model_folder, problems, params, [settings, dropping], num_threads=num_threads, their_rows=THEIR_ROWS
    )
    return {
        **compare(settings, trl, turnwise, num_threads=num_threads, rounds=rounds),
        "turnwise_dropping": turnwise_dropping,
        "trl_step_ratio_dropping": ratio(trl, turnwise_dropping, "seconds_per_token_median"),
    }


def measure_large(
    model_folder: Path,
    problems: Sequence[Problem],
    params: dict[str, Any],
    *,
    num_threads: int,
    rounds: int,
    their_rows: int,
) -> dict[str, Any]:
    """The same of a model of which only two trainers fit on a card: `their_rows` of each of TRL's forwards, and no
    third run.
    """
    settings = grpo_settings(params, rounds)
    trl, turnwise = in_turn(model_folder, problems, params, [settings], num_threads=num_threads, their_rows=their_rows)
    return compare(settings, trl, turnwise, num_threads=num_threads, rounds=rounds)


def in_turn(
    model_folder: Path,
    problems: Sequence[Problem],
    params: dict[str, Any],
    chosen: Sequence[GRPOSettings],
    *,
    num_threads: int,
    their_rows: int,
) -> list[dict[str, Any]]:
    """Summaries of TRL's batches, trained by the first of the `chosen` settings, and of ours by each of them."""
    first = chosen[0]
    drawn = draws(problems, first, seed=params["seed"], batches=first.num_iterations)
    ours = [our_batches(model_folder, drawn, params, settings, num_threads) for settings in chosen]
    our_rounds: list[list[Batch]] = [[] for _ in ours]

    def play_ours() -> None:
        for batches, trainer in zip(our_rounds, ours, strict=True):
            batches.append(next(trainer))

    their_rounds = their_batches(
        model_folder, drawn, params, first, num_threads, between=play_ours, their_rows=their_rows
    )
    return [summary(batches[UNMEASURED:]) for batches in (their_rounds, *our_rounds)]


def compare(
    settings: GRPOSettings, trl: dict[str, Any], turnwise: dict[str, Any], *, num_threads: int, rounds: int
) -> dict[str, Any]:
    return {
        "num_threads": num_threads,
        "rounds": rounds,
        "problems": settings.problems_per_iteration,
        "group_size": settings.group_size,
        "updates_per_batch": settings.updates_per_batch,
        "trl": trl,
        "turnwise": turnwise,
        "trl_step_ratio": ratio(trl, turnwise, "seconds_per_token_median"),
        "trl_step_ratio_of_best": ratio(trl, turnwise, "seconds_per_token_best"),
        "trl_step_ratio_not_normalised": ratio(trl, turnwise, "seconds_median"),
    }


def ratio(theirs: dict[str, Any], ours: dict[str, Any], name: str) -> float:
    return float(theirs[name] / ours[name])


def grpo_settings(params: dict[str, Any], rounds: int) -> GRPOSettings:
    """The run's own, made comparable: the same problems for both, nothing dropped, no reference moved midway."""
    options = {
        **params["train"],
        "num_iterations": rounds + UNMEASURED,
        "problem_sampler": "uniform",
        "zero_variance_groups": "keep",
        "max_replacement_rounds": 0,
        "reference_interval": None,
        "schedule": "constant",
    }
    settings = GRPOSettings.model_validate(options)
    assert settings.aggregation == "token" and settings.loss == "ppo" and settings.importance_correction == "none"
    return settings


def draws(problems: Sequence[Problem], settings: GRPOSettings, *, seed: int, batches: int) -> list[list[Problem]]:
    sampler = ProblemSampler(problems, settings, seed=seed)
    return [sampler.draw(number, 0, settings.problems_per_iteration) for number in range(1, batches + 1)]


def our_batches(
    model_folder: Path,
    drawn: Sequence[Sequence[Problem]],
    params: dict[str, Any],
    settings: GRPOSettings,
    num_threads: int,
) -> Iterator[Batch]:
    """turnwise's batches, each computed when it is asked for."""
    sampling, chat = SamplingSettings(**params["sampling"]), load_chat(model_folder)
    engine = EngineSettings(**params["engine"])
    device = params["compute"]["device"]
    compute = on_cpu(num_threads).model_copy(update={"device": device})
    model = load_model(model_folder, compute=compute)
    everything = [problem for problems in drawn for problem in problems]
    sampler = ProblemSampler(everything, settings, seed=params["seed"])
    order = iter(drawn)
    sampler.draw = lambda *_: list(next(order))  # type: ignore[method-assign]
    collector = Collector(
        EngineEpisodes(
            load_engine(
                model_folder,
                chat,
                engine=engine,
                sampling=sampling,
                compute=compute,
                model=model,
            ),
            chat,
            sampling,
        ),
        load_environment(EnvironmentSettings(**params["environment"])),
        max_concurrent_episodes=engine.max_concurrent_episodes,
        seed=params["seed"],
        stage="bench",
    )
    rewards = RewardSettings(**params["reward"])
    collect = group_collector(collector, sampler, rewards=rewards, prefixes=None, explore=lambda _: settings.group_size)
    trainer = GRPOTrainer(
        model,
        settings,
        compute=compute,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens_per_episode,
    )
    for _ in drawn:
        torch.use_deterministic_algorithms(mode=device == "cpu", warn_only=True)
        start = time.perf_counter()
        trainer.iterate(collect)
        seconds = time.perf_counter() - start
        torch.use_deterministic_algorithms(mode=False)
        played = [trajectory for group in trainer.last_groups for trajectory in group.trajectories]
        yield Batch(
            seconds,
            sampled_tokens=sum(trajectory.num_sampled_tokens for trajectory in played),
            episodes=len(played),
            successes=sum(trajectory.is_success for trajectory in played),
        )


def summary(batches: Sequence[Batch]) -> dict[str, Any]:
    """Best and median over the rounds; tokens, episodes and successes are means a batch."""
    seconds = [batch.seconds for batch in batches]
    per_token = [batch.seconds / batch.sampled_tokens for batch in batches]
    episodes = sum(batch.episodes for batch in batches)
    return {
        "seconds": seconds,
        "seconds_best": min(seconds),
        "seconds_median": statistics.median(seconds),
        "seconds_per_token_best": min(per_token),
        "seconds_per_token_median": statistics.median(per_token),
        "sampled_tokens": statistics.mean(batch.sampled_tokens for batch in batches),
        "episodes": episodes / len(batches),
        "tokens_an_episode": sum(batch.sampled_tokens for batch in batches) / episodes,
        "success_rate": sum(batch.successes for batch in batches) / episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One GRPO batch of turnwise against one of TRL.")
    parser.add_argument("model_folder", type=Path)
    parser.add_argument("problems", type=Path, help="a JSONL file of Problems, such as curate/train.jsonl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    problems = [Problem.model_validate(row) for _, row in read_jsonl(options.problems)]
    figures = measure(options.model_folder, problems, demo_params(), num_threads=options.threads, rounds=options.rounds)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
