"""An update of the demo's model with attention in C against torch's kernel, in turns, in one process.

Groups are shaped as the demo's: a prompt of 24 tokens, then 60 to 220 of each trajectory's own. An update is what
`GRPOTrainer.update` does with groups that are there: trees, the reference's forward, two steps. Seconds are the
processor's, of all threads: on one thread, and in two lanes of one each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tasks.core.records import Group
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.models import attention
from tasks.models.settings import EmbeddedModelSettings, on_cpu
from tasks.models.torch_setup import prepare_torch
from tests.benchmarks.demo import demo_params
from tests.benchmarks.made_up import random_ids, random_model, scored_group
from tests.learning.options import grpo

PROMPT, LENGTHS, GROUP_SIZE, NUM_GROUPS, VOCABULARY = 24, (60, 220), 8, 8, 400
IS_NATIVE = {"torch's kernel": False, "C": True}


def demo_groups(seed: int = 0) -> list[Group]:
    rng, groups = random.Random(seed), []
    for number in range(NUM_GROUPS):
        lengths = [rng.randint(*LENGTHS) for _ in range(GROUP_SIZE)]
        turns = [random_ids(length, VOCABULARY, seed=rng.randrange(1 << 30)) for length in lengths]
        prompt = random_ids(PROMPT, VOCABULARY, seed=number)
        groups.append(scored_group(prompt, turns, [[-5.0] * length for length in lengths], number=number))
    return groups


def trainer_on(num_threads: int) -> GRPOTrainer:
    """Its rate is 0, so that every update computes the same."""
    options = grpo(group_size=GROUP_SIZE, micro_batch_tokens=4096, learning_rate=0.0, problems_per_iteration=NUM_GROUPS)
    model = random_model(VOCABULARY, EmbeddedModelSettings(**demo_params()["model"]["embedded"]))
    return GRPOTrainer(model, options, compute=on_cpu(num_threads), temperature=1.0, max_tokens=PROMPT + LENGTHS[1])


def seconds_of(trainer: GRPOTrainer, groups: Sequence[Group], *, is_native: bool) -> float:
    real = attention.is_native
    with mock.patch.object(attention, "is_native", lambda *tensors: is_native and real(*tensors)):
        start = time.process_time()
        trainer.update(1, groups)
        return time.process_time() - start


def measure(num_threads: int, *, rounds: int) -> dict[str, Any]:
    """Quartiles of the processor seconds of each way, and of their ratio within a round ("ratio")."""
    prepare_torch(on_cpu(num_threads))
    trainer, groups = trainer_on(num_threads), demo_groups()
    found: dict[str, list[float]] = {name: [] for name in IS_NATIVE}
    for number in range(rounds + 1):
        for name, is_native in IS_NATIVE.items():
            seconds = seconds_of(trainer, groups, is_native=is_native)
            if number:  # the first compiles, and takes memory
                found[name].append(seconds)
    pairs = list(zip(*found.values(), strict=True))
    found["ratio"] = [torch_seconds / native_seconds for torch_seconds, native_seconds in pairs]
    return {name: statistics.quantiles(values, n=4) for name, values in found.items()}
