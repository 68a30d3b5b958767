"""Trajectories to tensors: right-padded rows, sorted by length so that a micro-batch pads little.

Shapes: B rows of a micro-batch, T positions, M sampled tokens in it. The log-prob of a token is read from the logits
at the position before it, so `selected_BT` marks predicting positions, and every per-token tensor is flat, [M], in row
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.records import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward, and what the loss needs of each sampled token."""

    ids_BT: Tensor
    selected_BT: Tensor
    target_M: Tensor
    sampler_logp_M: Tensor
    advantage_M: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.target_M.numel())


@dataclass(frozen=True, slots=True)
class Row:
    """One row before padding: the ids, which of them were sampled, their sampler log-probs, the row's advantage."""

    token_ids: list[int]
    sampled_mask: list[bool]
    sampler_logp: list[float]
    advantage: float

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float) -> Row:
        return cls(trajectory.token_ids, trajectory.sampled_mask, trajectory.sampler_logp, advantage)


def micro_batches(sequences: Sequence[Row], *, rows: int, device: torch.device) -> list[MicroBatch]:
    """All sequences in rows of similar length; their order within the step does not matter, since gradients add up."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids))
    return [_pad(ordered[start : start + rows], device) for start in range(0, len(ordered), rows)]


def _pad(sequences: Sequence[Row], device: torch.device) -> MicroBatch:
    width = max(len(sequence.token_ids) for sequence in sequences)
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    sampled_BT = torch.zeros(len(sequences), width, dtype=torch.bool)
    sampler_logp: list[float] = []
    advantages: list[float] = []
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
        sampled_BT[row, : len(sequence.token_ids)] = torch.tensor(sequence.sampled_mask)
        chosen = [
            logp for logp, is_sampled in zip(sequence.sampler_logp, sequence.sampled_mask, strict=True) if is_sampled
        ]
        sampler_logp += chosen
        advantages += [sequence.advantage] * len(chosen)
    assert not sampled_BT[:, 0].any(), "nothing precedes the first token, so it cannot have been sampled"
    return MicroBatch(
        ids_BT=ids_BT.to(device),
        selected_BT=sampled_BT[:, 1:].to(device),
        target_M=ids_BT[:, 1:][sampled_BT[:, 1:]].to(device),
        sampler_logp_M=torch.tensor(sampler_logp, device=device),
        advantage_M=torch.tensor(advantages, device=device),
    )
