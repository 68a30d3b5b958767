"""Tensors that wait in host memory while the device needs its own for something else. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.models.torch_setup import free_unused


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
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda, requires_grad=False)
                self.buffers[name] = buffer
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
