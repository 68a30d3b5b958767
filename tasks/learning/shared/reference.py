"""The reference policy of the KL term, and how it follows the policy.

Full fine-tuning keeps a frozen copy of the model, in `compute.frozen`. With LoRA the reference is a second adapter on
the same base weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.batching import MicroBatch
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.lora import POLICY, REFERENCE, Adapter, adapter_tensors
from tasks.learning.shared.policy import LogProbs
from tasks.learning.shared.ranks import ALONE, Ranks
from tasks.learning.shared.settings import Autocast
from tasks.learning.shared.sharding import own_part, shard
from tasks.models.settings import Dtype


class Reference:
    """Frozen weights: those of the policy, whose forward is `log_probs`, at the start or at the last `follow`."""

    def __init__(self, log_probs: LogProbs, adapter: Adapter | None = None, *, frozen: Dtype, ranks: Ranks = ALONE):
        self.policy, self.adapter = log_probs.model, adapter
        if adapter is None:
            self.log_probs = LogProbs(_frozen_copy(log_probs.model, getattr(torch, frozen)))
            shard(self.log_probs, ranks, computes_in=None)
        else:
            adapter.add_copy(REFERENCE)
            self.log_probs = log_probs

    @torch.no_grad()
    def logps(
        self, batches: Sequence[MicroBatch], *, lanes: Lanes, temperature: float, autocast: Autocast
    ) -> list[Tensor]:
        """reference_logp of every micro-batch, [M] each; the model is in eval mode."""

        def logp(batch: MicroBatch) -> Tensor:
            found: Tensor = self.log_probs(batch, temperature=temperature, autocast=autocast)
            return found

        with nullcontext() if self.adapter is None else self.adapter.active(REFERENCE):
            return lanes.each(batches, logp)

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """reference ← (1 − mix)·reference + mix·policy; mix 1 copies, the only one with LoRA: B·A of mixed A and B is
        not the mix of both B·A. Source: TR-DPO, arXiv:2404.09656 eq. 5.

        In bfloat16 a step of less than 1/256 of a weight is lost.
        """
        policy = self._policy_tensors()
        for name, target in self.tensors().items():
            target.lerp_(policy[name].to(target.dtype), mix) if mix < 1 else target.copy_(policy[name])

    def is_policy(self) -> bool:
        """Whether both have the same bits, in this rank's part of the weights."""
        policy = self._policy_tensors()
        return all(
            tensor.dtype == policy[name].dtype and torch.equal(own_part(tensor), own_part(policy[name]))
            for name, tensor in self.tensors().items()
        )

    def _policy_tensors(self) -> dict[str, Tensor]:
        return trained_tensors(self.policy, self.adapter)

    def tensors(self) -> dict[str, Tensor]:
        return trained_tensors(self.log_probs.model, self.adapter, REFERENCE)


def _frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Its parameters in `dtype`; buffers keep theirs."""
    cast = {
        id(item): torch.nn.Parameter(item.detach().to(dtype, copy=True), requires_grad=False)
        for item in model.parameters()
    }
    return copy.deepcopy(model, cast).eval()


def trained_tensors(model: PreTrainedModel, adapter: Adapter | None, name: str = POLICY) -> dict[str, Tensor]:
    """What is trained, by name: the whole model, or the adapter of that name in it."""
    return unique_tensors(model) if adapter is None else adapter_tensors(model, name)


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once: tied embeddings are one tensor."""
    return {name: tensor.detach() for name, tensor in _first_named(model).values()}


def with_tied(model: PreTrainedModel, unique: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies of `unique_tensors(model)`, tied ones under each of their names."""
    first = _first_named(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, unique[first[id(tensor)][0]]


def _first_named(model: PreTrainedModel) -> dict[int, tuple[str, Tensor]]:
    """The first name of each tensor, and the tensor itself."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor))
    return first
