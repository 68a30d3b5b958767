"""The reference policy of the KL term, and how it follows the policy.

Full fine-tuning keeps a copy of the weights, in `compute.frozen`, and no second model: `functional_call` runs the
policy's model on them. With LoRA the reference is a second adapter on the same base weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from tasks.learning.shared.batching import MicroBatch
from tasks.learning.shared.lora import POLICY, REFERENCE, Adapter
from tasks.learning.shared.policy import Autocast, token_logp
from tasks.models.settings import Dtype


class _LogProbs(torch.nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batches: Sequence[MicroBatch], temperature: float, autocast: Autocast) -> list[Tensor]:
        return [token_logp(self.model, batch, temperature=temperature, autocast=autocast) for batch in batches]


class Reference:
    """Frozen weights: those of the policy at the start, or at the last `follow`."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter | None = None, *, frozen: Dtype):
        self.model, self.adapter = model, adapter
        if adapter is None:
            dtype, trained = getattr(torch, frozen), {name for name, _ in model.named_parameters()}
            self.frozen = {
                name: tensor.detach().to(dtype if name in trained else tensor.dtype, copy=True)
                for name, tensor in unique_tensors(model).items()
            }
        else:
            adapter.add_copy(REFERENCE)

    @torch.no_grad()
    def logps(self, batches: Sequence[MicroBatch], *, temperature: float, autocast: Autocast) -> list[Tensor]:
        """reference_logp of every micro-batch, [M] each; the model is in eval mode."""
        forward, arguments = _LogProbs(self.model), (batches, temperature, autocast)
        if self.adapter is not None:
            with self.adapter.active(REFERENCE):
                return forward(*arguments)
        frozen = {f"model.{name}": tensor for name, tensor in self.frozen.items()}
        return functional_call(forward, frozen, arguments)

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """reference ← (1 − mix)·reference + mix·policy; mix 1 copies. Source: TR-DPO, arXiv:2404.09656 eq. 5.

        In bfloat16 a step of less than 1/256 of a weight is lost.
        """
        policy = unique_tensors(self.model) if self.adapter is None else self.adapter.tensors(POLICY)
        for name, target in self.tensors().items():
            target.lerp_(policy[name].to(target.dtype), mix) if mix < 1 else target.copy_(policy[name])

    def tensors(self) -> dict[str, Tensor]:
        return self.frozen if self.adapter is None else self.adapter.tensors(REFERENCE)


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers by name, each storage once: tied embeddings are one tensor."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def with_tied(model: PreTrainedModel, unique: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Copies of `unique_tensors(model)`, tied ones under each of their names."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        key = name if not tensor.numel() else first.setdefault(tensor.data_ptr(), name)
        yield name, unique[key]


def copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    if source.keys() != target.keys():
        different = sorted(source.keys() ^ target.keys())[:3]
        raise ValueError(f"the weights are of another model: only one side has {', '.join(different)}.")
    for name, tensor in target.items():
        tensor.copy_(source[name])
