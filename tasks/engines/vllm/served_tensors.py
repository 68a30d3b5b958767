"""A policy's tensors as vLLM takes them: in the engine's dtype, under the names of a model's files, one at a time.

A head that shares the embedding's tensor becomes a tensor of its own (`weights_folder.py` says why). Every way to send
weights reads this stream, so no second copy of the model is made unless the way itself needs one (NCCL).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.models.policy_weights import PolicyWeights
from tasks.models.saving import stored_as

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def torch_dtype(name: str) -> torch.dtype | None:
    """None for `auto`, with which weights keep the trainer's dtype and vLLM casts them."""
    import torch

    found: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return found


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as it is served, without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def served_tensors(
    weights: PolicyWeights, dtype: torch.dtype | None, *, copy_to: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """With `copy_to` every tensor is a copy on that device; otherwise it is where the policy's is, and may be it."""
    seen: set[int] = set()
    for name, tensor in _tensors_of_files(weights):
        is_shared = bool(tensor.numel()) and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        is_copied = copy_to is not None or is_shared
        yield name, tensor.detach().to(copy_to or tensor.device, stored_as(tensor, dtype), copy=is_copied)


def describe_tensors(weights: PolicyWeights, dtype: torch.dtype | None) -> list[Described]:
    """What `served_tensors` yields, in that order; none is cast or copied."""
    without_numbers = PolicyWeights(
        weights.model, lambda: ((name, tensor.to("meta")) for name, tensor in weights.tensors())
    )
    found = _tensors_of_files(without_numbers)
    return [Described(name, stored_as(tensor, dtype), tuple(tensor.shape)) for name, tensor in found]


def _tensors_of_files(weights: PolicyWeights) -> Iterator[tuple[str, Tensor]]:
    """Where transformers joins tensors of the files into one (experts), it splits them again, which takes all at
    once.
    """
    if getattr(weights.model, "_weight_conversions", None) == []:
        return weights.tensors()
    from transformers.core_model_loading import revert_weight_conversion

    return iter(revert_weight_conversion(weights.model, dict(weights.tensors())).items())
