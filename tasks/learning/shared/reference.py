"""The reference policy that the KL term holds on to, and how it follows the policy.

Full fine-tuning keeps a frozen copy of the model; with LoRA it is a second adapter on the same base weights, so no
second model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.batching import MicroBatch
from tasks.learning.shared.lora import POLICY, REFERENCE, Adapter, frozen_copy
from tasks.learning.shared.policy import Autocast, token_logp


class Reference:
    """Frozen weights: those of the policy as it was at the start or at the last `follow`."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter | None = None):
        self.model, self.adapter = model, adapter
        if adapter is None:
            self.frozen = frozen_copy(model)
        else:
            adapter.add_reference()

    @torch.no_grad()
    def logps(self, batches: Sequence[MicroBatch], *, temperature: float, autocast: Autocast) -> list[Tensor]:
        """reference_logp of every micro-batch, [M] each."""
        with self._in_use() as model:
            return [token_logp(model, batch, temperature=temperature, autocast=autocast) for batch in batches]

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """Move towards the policy: reference ← (1 − mix)·reference + mix·policy; mix 1 is a hard copy.

        Source of the mixed update: TR-DPO, arXiv:2404.09656 eq. 5.
        """
        policy = self._policy()
        for name, target in self.tensors().items():
            target.lerp_(policy[name], mix) if mix < 1 else target.copy_(policy[name])

    def tensors(self) -> dict[str, Tensor]:
        """The reference's own weights, views that may be written to."""
        return unique_tensors(self.frozen) if self.adapter is None else self.adapter.tensors(REFERENCE)

    def _policy(self) -> dict[str, Tensor]:
        return unique_tensors(self.model) if self.adapter is None else self.adapter.tensors(POLICY)

    @contextmanager
    def _in_use(self) -> Iterator[PreTrainedModel]:
        if self.adapter is None:
            yield self.frozen
            return
        was_training = self.model.training
        self.model.eval()
        with self.adapter.active(REFERENCE):
            yield self.model
        self.model.train(was_training)


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by name, each storage once: tied embeddings are one tensor."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Write every tensor of `source` into its namesake in `target`."""
    if source.keys() != target.keys():
        different = sorted(source.keys() ^ target.keys())[:3]
        raise ValueError(f"weights of another model: {', '.join(different)} are in one and not in the other.")
    for name, tensor in target.items():
        tensor.copy_(source[name])
