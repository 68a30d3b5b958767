"""A model's weights cut over the ranks (torch's FSDP2): each holds its part of every tensor, and has a layer's whole
weights only while it computes that layer.

Gradients are added up over the ranks, never averaged: the loss of each micro-batch has the denominator of the whole
optimizer step already. With one rank nothing is cut and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.learning.shared.ranks import Ranks
from tasks.models.settings import Dtype

if TYPE_CHECKING:
    from tasks.learning.shared.policy import LogProbs

NamedTensors = dict[str, dict[str, Tensor]]
Dtypes = dict[str, torch.dtype]
Shapes = dict[str, dict[str, tuple[torch.Size, torch.dtype]]]


def computed_dtype(weights: Dtype, ranks: Ranks) -> torch.dtype | None:
    """Of a forward, where it is not that of the weights: cut weights are the optimizer's float32 masters themselves."""
    return torch.bfloat16 if weights == "bfloat16" and ranks.size > 1 else None


def shard(log_probs: LogProbs, ranks: Ranks, *, computes_in: torch.dtype | None) -> None:
    """Cut the model over the ranks, layer by layer, then what is outside the layers; all ranks have equal weights.

    `computes_in` bfloat16 keeps what is trained in float32 and casts it for each forward; None computes in the dtype
    of the weights.
    """
    if ranks.mesh is None:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    policy = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = [module for module in log_probs.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, log_probs):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        # Also the root frees its weights after a forward: one without a backward would leave old ones in the model.
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)
    for module in log_probs.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all parts of one that is cut; every rank must ask for it."""
    return tensor.full_tensor() if _is_cut(tensor) else tensor


def shapes_of(tensors: NamedTensors) -> Shapes:
    return {
        part: {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()} for part, named in tensors.items()
    }


def gather_whole(tensors: dict[str, Tensor], ranks: Ranks, *, dtypes: Dtypes | None = None) -> dict[str, Tensor]:
    """On rank 0 whole copies in host memory, in `dtypes` (None: their own), elsewhere nothing; with one rank the
    tensors themselves. One after the other, so that a device holds one whole tensor at a time.
    """
    if ranks.size == 1:
        return tensors
    found = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if ranks.leads:
            found[name] = gathered.to("cpu", gathered.dtype if dtypes is None else dtypes[name])
    return found


class SharedTensors(Mapping[str, Tensor]):
    """Rank 0's whole tensors, on every rank; the others have none and know their shapes. Each is sent when it is asked
    for, so a rank has one at a time, and all ranks must ask for the same in the same order.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], tensors: Mapping[str, Tensor] | None, ranks: Ranks
    ):
        self.shapes, self.tensors, self.ranks = shapes, tensors, ranks

    def __getitem__(self, name: str) -> Tensor:
        tensor = None if self.tensors is None else self.tensors[name]
        if tensor is not None and self.ranks.size == 1:
            return tensor
        return self.ranks.share(tensor, *self.shapes[name])

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # without sending it, as Mapping's own would

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shared(shapes: Shapes, tensors: NamedTensors | None, ranks: Ranks) -> dict[str, SharedTensors]:
    return {
        part: SharedTensors(named, None if tensors is None else tensors[part], ranks) for part, named in shapes.items()
    }


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, which every rank has whole, cut as `like` is; itself where that is whole. A copy: a view of the part
    would keep the whole.
    """
    if not _is_cut(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()


def _is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose import takes a second
