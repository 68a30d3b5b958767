"""How the time of an iteration grows with the group and with what is sampled, on a random model of the demo's size.

Two problems with prompts of 128 tokens; group sizes 2 to 32 at 128 sampled tokens a trajectory, then 64 to 1024 sampled
tokens in groups of 8. The engine plays one turn of exactly that length (no token ends it) and the trainer takes its μ
steps with the demo's settings; both are timed. The slope is that of a straight line through the logarithms: 0 is free,
1 doubles with what doubles. It is below 1 while fixed costs weigh, so the slope of the last doubling is stated too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasks.core.records import Group
from tasks.core.seeds import stream_seed
from tasks.engines.transformers.engine import TransformersEngine
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.settings import EmbeddedModelSettings, on_cpu
from tasks.models.torch_setup import prepare_torch
from tasks.rollouts.engine import TurnReply, TurnRequest
from tests.benchmarks.made_up import random_ids, random_model, scored_group

PROBLEMS, PROMPT, VOCABULARY = 2, 128, 400
GROUP_SIZES, SAMPLED_LENGTHS = (2, 4, 8, 16, 32), (64, 128, 256, 512, 1024)
GROUP_SIZE, SAMPLED = 8, 128  # what is held while the other grows
PARTS = ("rollout", "update", "iteration")


@dataclass(frozen=True, slots=True)
class Seconds:
    """One iteration: its rollout, and the whole."""

    rollout: float
    iteration: float

    @property
    def update(self) -> float:
        return self.iteration - self.rollout


class Point:
    """One size of iteration, with an engine and a trainer of its own; the rate is 0, so that rounds are alike."""

    def __init__(self, params: dict[str, Any], *, group_size: int, sampled: int):
        self.group_size, self.sampled = group_size, sampled
        embedded = {**params["model"]["embedded"], "max_position_embeddings": PROMPT + max(SAMPLED_LENGTHS)}
        model = random_model(VOCABULARY, EmbeddedModelSettings(**embedded))
        self.engine = TransformersEngine(
            model,
            end_ids=(),
            temperature=1.0,
            top_p=1.0,
            stop=None,
            max_context=PROMPT + sampled,
            max_concurrent_episodes=PROBLEMS * group_size,
            kv_cache_bytes=None,
            num_threads=torch.get_num_threads(),
        )
        settings = GRPOSettings(**{**params["train"], "learning_rate": 0.0})
        self.trainer = GRPOTrainer(model, settings, compute=on_cpu(1), temperature=1.0, max_tokens=PROMPT + sampled)

    def iterate(self) -> Seconds:
        rollout = 0.0

        def collect(iteration: int, round_number: int, num_problems: int) -> list[Group]:
            nonlocal rollout
            start = time.perf_counter()
            groups = self._play(iteration)
            rollout = time.perf_counter() - start
            return groups

        start = time.perf_counter()
        self.trainer.iterate(collect)
        return Seconds(rollout, time.perf_counter() - start)

    def _play(self, iteration: int) -> list[Group]:
        prompts = [random_ids(PROMPT, VOCABULARY, seed=number) for number in range(PROBLEMS)]
        handles = list(itertools.product(range(PROBLEMS), range(self.group_size)))
        for handle, (number, sample) in enumerate(handles):
            seed = stream_seed(iteration, number, sample)
            self.engine.submit(TurnRequest(handle, prompts[number], self.sampled, seed))
        replies: dict[int, TurnReply] = {}
        while len(replies) < len(handles):
            replies |= {reply.episode: reply for reply in self.engine.poll()}
        for handle in replies:
            self.engine.release(handle)
        return [
            scored_group(
                prompt,
                [replies[handle].token_ids for handle, (owner, _) in enumerate(handles) if owner == number],
                [replies[handle].sampler_logp for handle, (owner, _) in enumerate(handles) if owner == number],
                number=number,
            )
            for number, prompt in enumerate(prompts)
        ]


def measure(params: dict[str, Any], *, num_threads: int, rounds: int) -> dict[str, Any]:
    """Both curves: sizes, best seconds of each part over `rounds` (all points once a round), slopes."""
    prepare_torch(on_cpu(num_threads))
    points = [Point(params, group_size=size, sampled=SAMPLED) for size in GROUP_SIZES]
    points += [Point(params, group_size=GROUP_SIZE, sampled=length) for length in SAMPLED_LENGTHS]
    Point(params, group_size=GROUP_SIZE, sampled=SAMPLED).iterate()
    played = [[point.iterate() for point in points] for _ in range(rounds)]
    best = {part: [min(getattr(row[index], part) for row in played) for index in range(len(points))] for part in PARTS}
    split = len(GROUP_SIZES)
    return {
        "model": params["model"]["embedded"],
        "problems": PROBLEMS,
        "prompt": PROMPT,
        "updates_per_batch": params["train"]["updates_per_batch"],
        "group_size": curve(GROUP_SIZES, {part: best[part][:split] for part in PARTS}) | {"sampled": SAMPLED},
        "sampled_length": curve(SAMPLED_LENGTHS, {part: best[part][split:] for part in PARTS})
        | {"group_size": GROUP_SIZE},
    }


def curve(sizes: Sequence[int], seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "sizes": list(sizes),
        "seconds": seconds,
        "slope": {part: slope(sizes, values) for part, values in seconds.items()},
        "slope_of_last_doubling": {part: slope(sizes[-2:], values[-2:]) for part, values in seconds.items()},
    }


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Of the least-squares line through log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
