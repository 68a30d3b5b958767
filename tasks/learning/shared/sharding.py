"""A model's weights cut over the ranks (torch's FSDP2): each holds its part of every tensor, and has a layer's whole
weights only while it computes that layer.

Gradients are added up over the ranks, never averaged: the loss of each micro-batch has the denominator of the whole
optimizer step already. With one rank nothing is cut and nothing changes.
"""

from __future__ import annotations

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


def share_whole(shapes: Shapes, tensors: NamedTensors | None, ranks: Ranks, *, like: NamedTensors) -> NamedTensors:
    """Rank 0's whole tensors; the others have None and know their shapes. Each is cut as that of its name in `like` is
    before the next one is sent, so that no rank has the whole state. With one rank the tensors themselves.
    """
    if ranks.size == 1 and tensors is not None:
        return tensors
    found: NamedTensors = {}
    for part, named in shapes.items():
        found[part] = {}
        for name, (shape, dtype) in named.items():
            sent = ranks.share(None if tensors is None else tensors[part][name], shape, dtype)
            owner = like[part].get(name)
            found[part][name] = sent if owner is None or owner.shape != shape else part_of(sent, owner)
    return found


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, which every rank has whole, cut as `like` is; itself where that is whole or this is cut already."""
    if not _is_cut(like) or _is_cut(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Whole tensors into those of the same names, of which each rank may have its part."""
    if source.keys() != target.keys():
        different = sorted(source.keys() ^ target.keys())[:3]
        raise ValueError(f"the weights are of another model: only one side has {', '.join(different)}.")
    for name, tensor in target.items():
        tensor.copy_(part_of(source[name], tensor))


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of it; the tensor itself where it is whole."""
    return tensor.to_local() if _is_cut(tensor) else tensor


def _is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose import takes a second
