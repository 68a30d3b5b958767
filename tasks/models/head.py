"""A model's own forward without its layers: its head, with whatever the family does to hidden states and logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def without_layers(model: PreTrainedModel, layers: torch.nn.Module, output: type[Any]) -> PreTrainedModel:
    """A shallow copy of the model whose layers return their input embeddings. No tensor is copied."""

    def give_back(*_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return output(last_hidden_state=inputs_embeds)

    stand_in = copy.copy(layers)
    stand_in.forward = give_back
    path = next(name for name, module in model.named_modules() if module is layers)
    head: PreTrainedModel = with_replaced(model, path.split("."), stand_in)
    return head


def with_replaced(module: Any, path: list[str], replacement: torch.nn.Module) -> Any:
    """A shallow copy of `module` with another one at `path` below it."""
    if not path:
        return replacement
    first, *rest = path
    changed = copy.copy(module)
    changed._modules = {**module._modules, first: with_replaced(module._modules[first], rest, replacement)}
    return changed
