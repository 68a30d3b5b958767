"""The policy in one piece: what an engine in the same memory generates with, and what snapshots are written from.

A model that is cut over several ranks cannot generate on one of them, so rank 0 keeps a copy. With one rank it is the
trainer's model itself.
"""

from __future__ import annotations

import copy
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tasks.core.files import SHARED_SECONDS
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.reference import trained_tensors
from tasks.learning.shared.sharding import copy_tensors
from tasks.models.folders import weights_hash

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class WholePolicy:
    """`model`, with `adapter` in it. A copy is made before the trainer cuts its model; in host memory where the engine
    has memory of its own.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter | None, ranks: Ranks, *, in_host_memory: bool):
        self.model, self.adapter = model, adapter
        self.is_copy = ranks.size > 1
        if self.is_copy:
            self.model, self.adapter = copy.deepcopy((model, adapter))
            if in_host_memory:
                self.model.to("cpu")

    def take(self, tensors: dict[str, Tensor]) -> None:
        """The weights that the trainer has now, as its `policy_tensors` gives them."""
        if self.is_copy:
            self.put(tensors)

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor]) -> None:
        """Weights of another time; with one rank the trainer has them too."""
        copy_tensors(tensors, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        return trained_tensors(self.model, self.adapter)


def refuse_other_weights(start: Path, weights: str) -> None:
    """On a rank that rank 0 told the hash of what it starts from, maybe a moment after it was written: ValueError where
    another one is still seen here after the time in which a network's folder may lag.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    while (own := _seen_weights(start)) != weights and time.monotonic() < deadline:
        time.sleep(0.2)
    if own != weights:
        seen = "(none that can be read)" if own is None else own[:8]
        raise ValueError(
            f"{start} has the weights {seen} on {socket.gethostname()} and {weights[:8]} on rank 0's machine, so "
            f"the ranks would train different policies. Put the project's folder on storage that all nodes share."
        )


def _seen_weights(start: Path) -> str | None:
    """None where they are not all there."""
    try:
        return weights_hash(start)
    except (ValueError, OSError):
        return None
