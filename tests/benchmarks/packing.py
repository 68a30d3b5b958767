"""One GRPO train step on a group shaped like BFCL's, tree-packed against padded rows, on CPU.

The group has a prompt of 4,000 tokens and eight trajectories of 300 sampled tokens, the model is 512 wide with 4 layers
and random weights. A step is what `GRPOTrainer.iterate` does with a group it is given: micro-batches, forward, backward,
optimizer. Rows get their best case: all have the same length, so nothing is lost to padding, and they go one at a time
and all eight at once. Causal rows need no mask; rows with an explicit mask ([B, 1, T, T], additive, as a padded batch
has in many trainers) are there because that is what they are often compared with.

Memory is that of a process of its own (`python -m tests.benchmarks.packing NAME THREADS`): peak resident size of its
first step above what it was with model, gradients and optimizer in place, since freed memory is kept for reuse.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.learning.batching import Packing
from tasks.learning.options import EmbeddedModelSettings
from tasks.learning.trainer import GRPOTrainer
from tasks.records import Group
from tasks.runtime import prepare_torch
from tests.benchmarks.made_up import random_group, random_model
from tests.conftest import ROOT
from tests.learning.options import grpo

PROMPT, SAMPLED, GROUP_SIZE, VOCABULARY = 4000, 300, 8, 2000
MODEL = EmbeddedModelSettings(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    initializer_range=0.02,
    max_position_embeddings=8192,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute the step: the trainer's packing, trajectories a forward, and whether rows carry a mask."""

    packing: Packing
    at_once: int
    has_mask: bool = False


VARIANTS = {
    "tree": Variant("tree", GROUP_SIZE),
    "rows, 8 at once": Variant("none", GROUP_SIZE),
    "rows, 1 at a time": Variant("none", 1),
    "masked rows, 8 at once": Variant("none", GROUP_SIZE, has_mask=True),
}
CAUSAL_ROWS = ("rows, 8 at once", "rows, 1 at a time")


class Step:
    """One variant's train step, over a model it shares with the others: the rate is 0, so nothing changes."""

    def __init__(self, model: PreTrainedModel, variant: Variant):
        self.model, self.variant = model, variant
        options = grpo(
            packing=variant.packing,
            micro_batch_tokens=variant.at_once * (PROMPT + SAMPLED),
            mu=1,
            kl_weight=0.0,
            learning_rate=0.0,
        )
        self.trainer = GRPOTrainer(model, options, temperature=1.0)

    def seconds(self, group: Group) -> float:
        hook = self.model.base_model.register_forward_pre_hook(with_mask, with_kwargs=True)
        if not self.variant.has_mask:
            hook.remove()
        start = time.perf_counter()
        self.trainer.iterate(lambda *_: [group])
        seconds = time.perf_counter() - start
        hook.remove()
        return seconds


def with_mask(_: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same call with a dense additive mask, which says what causal attention does by itself."""
    rows, length = named["input_ids"].shape
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(rows, 1, length, length).masked_fill_(hidden, float("-inf"))
    return arguments, {**named, "attention_mask": mask}


def bfcl_group() -> Group:
    return random_group(prompt=PROMPT, sampled=SAMPLED, size=GROUP_SIZE, vocabulary=VOCABULARY)


def tiny_group() -> Group:
    return random_group(prompt=16, sampled=4, size=GROUP_SIZE, vocabulary=VOCABULARY)


def measure(*, num_threads: int, rounds: int) -> dict[str, Any]:
    """Seconds and memory of every variant, and the two ratios.

    Seconds are the best of `rounds`, one step of each in turn. The speed-up is over the faster of the causal rows; the
    memory ratio is at equal accumulation, the whole group in one forward on both sides.
    """
    seconds = interleaved_seconds(num_threads, rounds)
    memory = {name: memory_of(name, num_threads) for name in VARIANTS}
    table = {name: {"seconds": min(seconds[name]), "all_seconds": seconds[name], **memory[name]} for name in VARIANTS}
    tree = table["tree"]
    rivals = [table[name] for name in CAUSAL_ROWS]
    return {
        "prompt": PROMPT,
        "sampled": SAMPLED,
        "group_size": GROUP_SIZE,
        "vocabulary": VOCABULARY,
        "model": MODEL.model_dump(),
        "variants": table,
        "speedup": min(rival["seconds"] for rival in rivals) / tree["seconds"],
        "memory_ratio": tree["step_mb"] / table["rows, 8 at once"]["step_mb"],
        "memory_ratio_to_rows_one_at_a_time": tree["step_mb"] / table["rows, 1 at a time"]["step_mb"],
    }


def interleaved_seconds(num_threads: int, rounds: int) -> dict[str, list[float]]:
    prepare_torch(num_threads)
    model = random_model(VOCABULARY, MODEL)
    steps = {name: Step(model, variant) for name, variant in VARIANTS.items()}
    for step in steps.values():
        step.seconds(tiny_group())
    group = bfcl_group()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step.seconds(group))
    return seconds


def memory_of(name: str, num_threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.packing", name, str(num_threads)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def resident_mb(field: str) -> float:
    """`VmRSS`, or its peak `VmHWM`. Not getrusage: its peak is the parent's where that was larger."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def main(arguments: Sequence[str]) -> None:
    name, num_threads = arguments
    prepare_torch(int(num_threads))
    step = Step(random_model(VOCABULARY, MODEL), VARIANTS[name])
    step.seconds(tiny_group())
    group = bfcl_group()
    before = resident_mb("VmRSS")
    step.seconds(group)
    print(json.dumps({"before_mb": before, "step_mb": resident_mb("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1:])
