"""An update of the demo's model by torch, with attention in C, and with whole layers in C, in turns, in one process.

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
from tasks.learning.shared import policy
from tasks.models import attention
from tasks.models.settings import EmbeddedModelSettings, on_cpu
from tasks.models.torch_setup import prepare_torch
from tests.benchmarks.demo import demo_params
from tests.benchmarks.made_up import random_ids, random_model, scored_group
from tests.learning.options import grpo

PROMPT, LENGTHS, GROUP_SIZE, NUM_GROUPS, VOCABULARY = 24, (60, 220), 8, 8, 400
# Whether attention is in C, and what is between the products of a layer.
WAYS = {"by torch": (False, False), "attention in C": (True, False), "layers in C": (True, True)}


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


def seconds_of(trainer: GRPOTrainer, groups: Sequence[Group], way: str) -> float:
    has_attention, has_layers = WAYS[way]
    attends, computes = attention.is_native, policy.fits
    with (
        mock.patch.object(attention, "is_native", lambda *tensors: has_attention and attends(*tensors)),
        mock.patch.object(policy, "fits", lambda model: has_layers and computes(model)),
    ):
        start = time.process_time()
        trainer.update(1, groups)
        return time.process_time() - start


def measure(num_threads: int, *, rounds: int) -> dict[str, Any]:
    """Quartiles of each way's processor seconds, and of the first's over the others' within a round ("… gains")."""
    prepare_torch(on_cpu(num_threads))
    trainer, groups = trainer_on(num_threads), demo_groups()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            seconds = seconds_of(trainer, groups, way)
            if number:  # the first compiles, and takes memory
                found[way].append(seconds)
    first, *others = WAYS
    gains = {f"{way} gains": [a / b for a, b in zip(found[first], found[way], strict=True)] for way in others}
    return {name: statistics.quantiles(values, n=4) for name, values in {**found, **gains}.items()}
