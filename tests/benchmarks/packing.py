"""One GRPO train step on a group shaped like BFCL's, tree-packed against padded rows, on CPU.

The group has a prompt of 4,000 tokens and eight trajectories of 300 sampled tokens; the model is 512 wide with 4 layers
and random weights. A step is what `GRPOTrainer.iterate` does with a group that is there: micro-batches, forward and
backward, optimizer. Rows get their best case: all have one length, so nothing is lost to padding, and they go one at a
time or all eight at once, the faster being the tree's opponent. Causal rows need no mask; rows with an explicit one
([B, 1, T, T], additive) are what a trainer has whose kernel takes padding from a mask.

Memory is that of a process of its own (`python -m tests.benchmarks.packing NAME THREADS`): peak resident size of a
step above what it was with model and optimizer in place. Freed memory is kept for reuse, so it has to be the first.
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

from tasks.core.records import Group
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.settings import Packing
from tasks.models.settings import EmbeddedModelSettings, on_cpu
from tasks.models.torch_setup import prepare_torch
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
    tools_in_prompt=False,
    thinks=False,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute the step: the trainer's packing, trajectories a forward, and whether rows carry a mask."""

    packing: Packing
    at_once: int
    has_mask: bool = False


TREE, AT_ONCE, ONE_BY_ONE, MASKED = (
    "tree",
    "causal rows, all at once",
    "causal rows, one by one",
    "masked rows, one by one",
)
VARIANTS = {
    TREE: Variant("tree", GROUP_SIZE),
    AT_ONCE: Variant("none", GROUP_SIZE),
    ONE_BY_ONE: Variant("none", 1),
    MASKED: Variant("none", 1, has_mask=True),
}


class Step:
    """One variant's train step, over a model it shares with the others: the rate is 0, so nothing changes."""

    def __init__(self, model: PreTrainedModel, variant: Variant):
        self.model, self.variant = model, variant
        options = grpo(
            packing=variant.packing,
            micro_batch_tokens=variant.at_once * (PROMPT + SAMPLED),
            updates_per_batch=1,
            kl_weight=0.0,
            learning_rate=0.0,
        )
        self.trainer = GRPOTrainer(model, options, compute=on_cpu(1), temperature=1.0, max_tokens=PROMPT + SAMPLED)

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


def bfcl_group(size: int = GROUP_SIZE) -> Group:
    return random_group(prompt=PROMPT, sampled=SAMPLED, size=size, vocabulary=VOCABULARY)


def tiny_group() -> Group:
    return random_group(prompt=16, sampled=4, size=GROUP_SIZE, vocabulary=VOCABULARY)


def measure(*, num_threads: int, rounds: int) -> dict[str, Any]:
    """Seconds and memory of every variant, and the two ratios.

    Seconds are the best of the rounds. The speed-up is over the faster of the causal rows; the memory ratio is at equal
    accumulation, the whole group in one forward on both sides. Beside it stands the one to rows one by one.
    """
    memory = {name: memory_of(name, num_threads) for name in VARIANTS}  # first, while this process is small
    seconds = interleaved_seconds(num_threads, rounds)
    return {
        "prompt": PROMPT,
        "sampled": SAMPLED,
        "group_size": GROUP_SIZE,
        "vocabulary": VOCABULARY,
        "model": MODEL.model_dump(),
        "variants": {
            name: {"seconds": min(seconds[name]), "all_seconds": seconds[name], **memory[name]} for name in VARIANTS
        },
        "speedup": min(*seconds[AT_ONCE], *seconds[ONE_BY_ONE]) / min(seconds[TREE]),
        "memory_ratio": memory[TREE]["step_mb"] / memory[AT_ONCE]["step_mb"],
        "memory_ratio_to_rows_one_by_one": memory[TREE]["step_mb"] / memory[ONE_BY_ONE]["step_mb"],
    }


def interleaved_seconds(num_threads: int, rounds: int) -> dict[str, list[float]]:
    """One step of each variant in turn. After the first round only what the speed-up is made of goes on: the tree, and
    whichever causal rows were faster.
    """
    prepare_torch(on_cpu(num_threads))
    model = random_model(VOCABULARY, MODEL)
    steps = {name: Step(model, variant) for name, variant in VARIANTS.items()}
    for step in steps.values():
        step.seconds(tiny_group())
    group = bfcl_group()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    playing = list(VARIANTS)
    for _ in range(rounds):
        for name in playing:
            seconds[name].append(steps[name].seconds(group))
        playing = [TREE, min(AT_ONCE, ONE_BY_ONE, key=lambda name: min(seconds[name]))]
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
    prepare_torch(on_cpu(int(num_threads)))
    step = Step(random_model(VOCABULARY, MODEL), VARIANTS[name])
    step.seconds(tiny_group())
    group = bfcl_group(2 if VARIANTS[name].at_once == 1 else GROUP_SIZE)  # the peak recurs with each row
    before = resident_mb("VmRSS")
    step.seconds(group)
    print(json.dumps({"before_mb": before, "step_mb": resident_mb("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1:])
