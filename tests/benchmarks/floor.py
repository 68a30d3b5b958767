"""The arithmetic floor: how long an iteration would take if nothing but its matrix products had to be done, at the rate
this machine multiplies matrices.

Counted is what no trainer can leave out, two operations a multiply-add:
- rollout: each distinct prompt once, each later token of each trajectory once, logits where a token was sampled;
- reference: the forward of the trees that carry loss, each distinct position once, logits where a sampled token is
  predicted;
- per update forward and backward of the same trees; backward is two products for each of forward's, so 3 forwards.
A forward is, for each position, the weights of every linear layer in the model; for each pair of a position and one it
sees, two products of the head size in every head; and the output matrix for each row of logits. Norms, activations,
softmax, sampling, the optimizer and the world count nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.core.records import Group
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.rows import Row
from tests.benchmarks.demo_iterations import Played

MATRIX_SIZES = (512, 1024, 2048)
BACKWARD = 2  # matrix products for each of forward's


@dataclass(frozen=True, slots=True)
class Work:
    """What a forward goes over: positions read, pairs of a position and one it sees, rows of logits."""

    positions: int = 0
    pairs: int = 0
    logits: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.positions + other.positions, self.pairs + other.pairs, self.logits + other.logits)


def rollout_work(group: Group) -> Work:
    """A prompt read once for its group, then every trajectory up to its last sampled token, which is never read."""
    total = Work()
    for number, trajectory in enumerate(group.trajectories):
        sampled = [index for index, is_sampled in enumerate(trajectory.sequences[0].sampled_mask) if is_sampled]
        prompt, end = sampled[0], sampled[-1]
        own = Work(end - prompt, _pairs(end) - _pairs(prompt), len(sampled) - 1)
        total += own + (Work() if number else Work(prompt, _pairs(prompt), 1))
    return total


def _pairs(length: int) -> int:
    """Causal pairs of a sequence: each position sees itself and all before it."""
    return length * (length + 1) // 2


def tree_work(rows: Sequence[Sequence[Row]]) -> Work:
    """Each distinct position of each group's tree once: the least a train step's forward has to go over."""
    groups = [group for group in rows if group]
    whole = sum(len(row.token_ids) for group in groups for row in group)
    batches = micro_batches(groups, packing="tree", max_tokens=max(1, whole), device=torch.device("cpu"))
    return sum((packed_work(batch) for batch in batches), Work())


def packed_work(batch: MicroBatch) -> Work:
    assert batch.tree is not None
    pairs = int((batch.tree.position_BT + 1).sum())
    return Work(batch.ids_BT.numel(), pairs, batch.predictor_U.numel())


def forward_operations(model: PreTrainedModel, work: Work) -> int:
    config = model.config
    layers = [item for item in model.base_model.modules() if isinstance(item, torch.nn.Linear)]
    a_position = sum(2 * layer.in_features * layer.out_features for layer in layers)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_pair = 2 * 2 * config.num_attention_heads * head_size * config.num_hidden_layers
    a_row_of_logits = 2 * config.hidden_size * config.vocab_size
    return work.positions * a_position + work.pairs * a_pair + work.logits * a_row_of_logits


def train_operations(model: PreTrainedModel, work: Work) -> int:
    """Forward and backward."""
    return (1 + BACKWARD) * forward_operations(model, work)


def measure(played: Played) -> dict[str, Any]:
    """Operations, machine's rate and the share of an iteration's time that they would need at that rate; the same for
    its rollout and its update (reference, optimizer steps) alone. Sums over all iterations.
    """
    rollout = update = 0
    steps = played.settings.train.updates_per_batch
    for iteration in played.iterations:
        rollout += sum(forward_operations(played.model, rollout_work(group)) for group in iteration.groups)
        trees = tree_work(iteration.rows)
        update += forward_operations(played.model, trees) + steps * train_operations(played.model, trees)
    assert played.settings.train.kl_weight > 0, "without a reference its forward is not needed"
    seconds = sum(iteration.seconds for iteration in played.iterations)
    rollout_seconds = sum(iteration.rollout_seconds for iteration in played.iterations)
    rate = matrix_rate()
    return {
        "operations": (rollout + update) / len(played.iterations),
        "matrix_rate": rate,
        "iteration_seconds": seconds / len(played.iterations),
        "floor_share": (rollout + update) / rate / seconds,
        "rollout_floor_share": rollout / rate / rollout_seconds,
        "update_floor_share": update / rate / (seconds - rollout_seconds),
    }


def matrix_rate(
    dtype: torch.dtype = torch.float32, *, sizes: Sequence[int] = MATRIX_SIZES, device: str = "cpu"
) -> float:
    """Operations a second in the best of several products of large square matrices, with this process's threads."""
    best = 0.0
    for size in sizes:
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for _ in range(10):
            _wait(device)
            start = time.perf_counter()
            one @ other
            _wait(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
