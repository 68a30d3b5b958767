"""Copies in host memory: pinned where they come from CUDA, finished when they are handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.learning.shared.host_memory import host_copies


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cpu", False)])
def test_copies_from_cuda_are_pinned_and_awaited(monkeypatch: pytest.MonkeyPatch, device: str, is_pinned: bool) -> None:
    """Tensors of the host stand for the GPU's; pinning is noted and not done."""
    pinned: list[bool] = []
    awaited: list[torch.device] = []
    empty_like = torch.empty_like

    def noted(tensor: torch.Tensor, *, device: str, pin_memory: bool, requires_grad: bool) -> Any:
        pinned.append(pin_memory)
        return empty_like(tensor, device=device, requires_grad=requires_grad)

    monkeypatch.setattr(torch, "empty_like", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", awaited.append)
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    copies = host_copies({"weight": weight}, torch.device(device))
    assert pinned == [is_pinned]
    assert len(awaited) == int(is_pinned)
    with torch.no_grad():
        weight.mul_(0)
    assert copies["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and not copies["weight"].requires_grad
