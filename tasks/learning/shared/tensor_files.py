"""The tensors of a checkpoint: copied to host memory, and written and read as safetensors files. Nothing is pickled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

Tensors = Mapping[str, Mapping[str, Tensor]]  # part → name → tensor; a part's name has no slash


class HostCopies:
    """Copies that later steps of training do not change. Those from CUDA are in pinned memory, which is kept for the
    next checkpoint, since pinning is slow (never run on a GPU); others are freed when they are written.
    """

    def __init__(self) -> None:
        self.stager: DefaultStager | None = None

    def of(self, tensors: Tensors) -> Tensors:
        plain = {
            part: {name: tensor.detach().contiguous() for name, tensor in named.items()}
            for part, named in tensors.items()
        }
        if any(tensor.is_cuda for named in plain.values() for tensor in named.values()):
            return self._pinned_stager().stage(plain)
        return {part: {name: tensor.clone() for name, tensor in named.items()} for part, named in plain.items()}

    def _pinned_stager(self) -> DefaultStager:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self.stager is None:
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
                )
            )
        return self.stager


def write_tensors(folder: Path, tensors: Tensors) -> None:
    """One file per part. OSError or ValueError where that fails."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from tasks.learning.shared.checkpoint_storage import SafetensorsWriter

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as `no_dist` says
    named = {f"{part}/{name}": tensor for part, inner in tensors.items() for name, tensor in inner.items()}
    try:
        dcp.save(named, storage_writer=SafetensorsWriter(folder, list(tensors)), no_dist=True)
    except CheckpointException as error:  # its text has many lines, and it is no Exception
        raise next(cause for cause, _ in error.failures.values()) from None


def read_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    from safetensors.torch import load_file

    return {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
