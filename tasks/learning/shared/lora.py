"""LoRA through PEFT: only a low-rank adapter is trained and saved.

PEFT changes the Hugging Face model in place, so engine and trainer still call the model's own forward. It is imported
only where a profile uses LoRA. Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.learning.shared.sharding import copy_tensors
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import Dtype, LoRASettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# PEFT's name for the first adapter; ours for the reference's, and for what an engine gets while another is trained.
POLICY, REFERENCE, SERVED = "default", "reference", "served"


class Adapter:
    """The adapters in `model`, in the dtype `weights`: the policy's, and copies of it under other names."""

    def __init__(self, model: PreTrainedModel, settings: LoRASettings, *, weights: Dtype):
        from peft import LoraConfig, get_peft_model

        self.config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target_modules, task_type="CAUSAL_LM"
        )
        self.model = model
        self.dtype = getattr(torch, weights)
        self.peft_model = get_peft_model(model, self.config)
        self._refuse_embeddings()
        self._cast()

    def add_copy(self, name: str) -> None:
        self.peft_model.add_adapter(name, self.config)
        self._cast()
        copy_tensors(self.tensors(POLICY), self.tensors(name))
        self._activate(POLICY)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """An adapter's weights as writable views, under the same names for every adapter."""
        return adapter_tensors(self.model, name)

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        self._activate(name)
        try:
            yield
        finally:
            self._activate(POLICY)

    def weights(self, name: str) -> PolicyWeights:
        return PolicyWeights(self.model, partial(self.merged, name), partial(self.save, name=name))

    @torch.no_grad()
    def merged(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name without adapters, a changed one as W + scale·B·A: the base stays as it is, so
        repeated merging adds no rounding.
        """
        changed = {f"{key}.weight": module for key, module in self.model.named_modules() if _is_adapted(module)}
        for key, tensor in self.model.state_dict().items():
            plain = key.replace(".base_layer.", ".")
            if plain in changed and plain != key:
                yield plain, tensor + changed[plain].get_delta_weight(name)
            elif "lora_" not in key:
                yield plain, tensor

    def save(self, folder: Path, *, name: str = POLICY) -> None:
        """As PEFT and vLLM load it."""
        self.peft_model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
        if name != POLICY:  # which PEFT puts into a folder below
            for file in (folder / name).iterdir():
                file.rename(folder / file.name)
            shutil.rmtree(folder / name)

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

    def _cast(self) -> None:
        for key, parameter in self.model.named_parameters():
            if "lora_" in key:
                parameter.data = parameter.data.to(self.dtype)

    def _activate(self, name: str) -> None:
        self.peft_model.set_adapter(name)
        for key, parameter in self.model.named_parameters():
            if "lora_" in key:
                parameter.requires_grad_(f".{POLICY}." in key)


def adapter_tensors(model: PreTrainedModel, name: str) -> dict[str, Tensor]:
    mark = f".{name}."
    return {
        key.replace(mark, "."): parameter.data
        for key, parameter in model.named_parameters()
        if "lora_" in key and mark in key
    }


def _is_adapted(module: torch.nn.Module) -> bool:
    return hasattr(module, "get_delta_weight")


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """For an engine beside a trainer: what is trained is copied, and what is frozen already is shared."""
    shared = {id(item): item for item in model.parameters() if not item.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()
