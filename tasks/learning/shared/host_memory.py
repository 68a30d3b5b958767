"""Tensors that wait in host memory while the device needs its own for something else. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.models.torch_setup import free_unused


def host_copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of what is on `device`, finished on return; from CUDA in pinned memory, which torch keeps for the next."""
    is_cuda = device.type == "cuda"
    copies = {name: _buffer(tensor, is_pinned=is_cuda) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        copies[name].copy_(tensor.detach(), non_blocking=True)
    if is_cuda:
        torch.cuda.synchronize(device)
    return copies


def _buffer(tensor: Tensor, *, is_pinned: bool) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=is_pinned, requires_grad=False)


class HostMemory:
    """A buffer by name for each tensor that was ever moved out; buffers are pinned for CUDA, and used again.

    A tensor stays the same object: only its data moves. Values never change.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[str, Tensor] = {}

    def move_out(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy each tensor into its buffer, which becomes its data, and give the device's memory back."""
        is_cuda = self.device.type == "cuda"
        for name, tensor in tensors.items():
            buffer = self.buffers.get(name)
            if buffer is None:
                buffer = self.buffers[name] = _buffer(tensor, is_pinned=is_cuda)
            buffer.copy_(tensor.detach(), non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(self.device)  # the copies are done before the device's memory is used again
        for name, tensor in tensors.items():
            tensor.data = self.buffers[name]
        free_unused(self.device)

    def move_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies on the device. Kernels that follow wait for them, being on the same stream."""
        for tensor in tensors.values():
            tensor.data = tensor.data.to(self.device, copy=True, non_blocking=True)
