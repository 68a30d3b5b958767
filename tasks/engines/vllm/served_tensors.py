"""A policy's tensors as vLLM takes them: in the engine's dtype, under the names of a model's files, one at a time.

A head that shares the embedding's tensor becomes a tensor of its own (`weights_folder.py` says why). Every way to send
weights reads this stream, so no second copy of the model is made unless the way itself needs one (NCCL).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.files import write_json
from tasks.models.files import INDEX
from tasks.models.policy_weights import PolicyWeights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARD_BYTES = 2 << 30  # of a file on disk, and so of what is gathered in host memory to write it


def torch_dtype(name: str) -> torch.dtype | None:
    """None for `auto`, with which weights keep the trainer's dtype and vLLM casts them."""
    import torch

    found: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return found


def served_tensors(
    weights: PolicyWeights, dtype: torch.dtype | None, *, copy: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """With `copy` no tensor is in the trainer's memory."""
    seen: set[int] = set()
    for name, tensor in _tensors_of_files(weights):
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        is_shared = bool(tensor.numel()) and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        yield name, tensor.detach().to(target, copy=copy or is_shared)


def _tensors_of_files(weights: PolicyWeights) -> Iterator[tuple[str, Tensor]]:
    """Where transformers joins tensors of the files into one (experts), it splits them again, which takes all at
    once.
    """
    if getattr(weights.model, "_weight_conversions", None) == []:
        return weights.tensors()
    from transformers.core_model_loading import revert_weight_conversion

    return iter(revert_weight_conversion(weights.model, dict(weights.tensors())).items())


def write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], *, max_bytes: int = SHARD_BYTES) -> None:
    """Safetensors files of at most `max_bytes`, or of one tensor that is larger, and their index."""
    from safetensors.torch import save_file

    file_of: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(_shards(tensors, max_bytes), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # or two shards would be in memory
    write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": file_of})


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor.to("cpu").contiguous()
        num_bytes += tensor.nbytes
    yield shard
