"""LoRA through PEFT: only a low-rank adapter is trained and saved.

PEFT changes the Hugging Face model in place, so engine and trainer still call the model's own forward. It is imported
only where a profile uses LoRA. Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.learning.shared.settings import LoRASettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLICY, REFERENCE = "default", "reference"  # PEFT's name for the first adapter; ours for the second


class Adapter:
    """The adapters in `model`: the policy's, and the reference's where KL needs one."""

    def __init__(self, model: PreTrainedModel, settings: LoRASettings):
        from peft import LoraConfig, get_peft_model

        self.config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target_modules, task_type="CAUSAL_LM"
        )
        self.model = model
        self.peft_model = get_peft_model(model, self.config)
        self._refuse_embeddings()

    def add_reference(self) -> None:
        self.peft_model.add_adapter(REFERENCE, self.config)
        policy = self.tensors(POLICY)
        with torch.no_grad():
            for name, tensor in self.tensors(REFERENCE).items():
                tensor.copy_(policy[name])
        self._activate(POLICY)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """An adapter's weights as writable views, under the same names for every adapter."""
        mark = f".{name}."
        return {
            key.replace(mark, "."): parameter.data
            for key, parameter in self.model.named_parameters()
            if "lora_" in key and mark in key
        }

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        self._activate(name)
        try:
            yield
        finally:
            self._activate(POLICY)

    @torch.no_grad()
    def merge_into(self, target: PreTrainedModel) -> None:
        written = dict(target.named_parameters())
        for name, merged in self.merged():
            written[name].copy_(merged)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The changed weights by plain name: W + scale·B·A. The base stays, so repeated merging adds no rounding."""
        for name, module in self.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                yield f"{name}.weight", module.base_layer.weight + module.get_delta_weight(POLICY)

    def save(self, folder: Path) -> None:
        self.peft_model.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False)

    def _refuse_embeddings(self) -> None:
        """An adapter of embeddings, often one tensor of two uses, is neither merged nor saved."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        adapted = [
            name
            for name, module in self.model.named_modules()
            if hasattr(module, "base_layer") and (module in ends or isinstance(module.base_layer, torch.nn.Embedding))
        ]
        if adapted:
            raise ValueError(
                f"train.lora.target_modules names {', '.join(adapted)}, but merging and saving drop adapters of "
                f"embeddings, so that training would be lost. Remove them, or set target_modules: all-linear."
            )

    def _activate(self, name: str) -> None:
        self.peft_model.set_adapter(name)
        for key, parameter in self.model.named_parameters():
            if "lora_" in key:
                parameter.requires_grad_(f".{POLICY}." in key)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()
