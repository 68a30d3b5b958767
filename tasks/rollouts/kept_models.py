"""Models in host memory between their turns to play, so that a stage reads their weights once, however often they play.

They are what engines with their own memory are compared with; `weights` are for an engine in this memory.

A model is kept where its caller expects it to play again and twice its size is left free, and so is the base of LoRA
snapshots; else files are read again. Playing changes no weight, so a kept model computes the same bits as one read
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.models.folders import folder_hash, load_model
from tasks.models.settings import ComputeSettings, Dtype
from tasks.models.torch_setup import find_device
from tasks.rollouts.kept_weights import KeptWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Key = tuple[str, Dtype | None]  # the hash of its files, so that an altered folder is another model; its dtype


class KeptModels:
    """`room` says how many bytes of host memory are free."""

    def __init__(self, room: Callable[[], float]):
        self.room, self.weights = room, KeptWeights(room)
        self._expected: set[str] = set()
        self._models: dict[Key, PreTrainedModel] = {}
        self._bases: dict[Key, PreTrainedModel] = {}
        self._lent: list[tuple[Key, PreTrainedModel]] = []

    def expect(self, folders: Iterable[Path]) -> None:
        """These models may play again; all others are let go."""
        folders = list(folders)
        self.weights.expect(folders)
        self._expected = set(map(folder_hash, folders))
        self._models = {key: model for key, model in self._models.items() if key[0] in self._expected}

    def lend(self, folder: Path, *, compute: ComputeSettings, dtype: Dtype | None = None) -> PreTrainedModel:
        """From memory, else from its files, on `compute.device`; the caller changes no weight, and gives it back."""
        key = folder_hash(folder), dtype
        kept = self._models.pop(key, None)
        load = self._copy_base if key in self._bases else partial(load_model, load_base=self._copy_base)
        model = kept or load(folder, compute=compute, dtype=dtype)
        self._lent.append((key, model.to(find_device(compute))))
        return model

    def take_back(self) -> None:
        """What was lent is no longer used."""
        while self._lent:
            key, model = self._lent.pop()
            if key[0] in self._expected and self._has_room(model):
                self._models[key] = model.to("cpu")

    def _copy_base(self, folder: Path, *, compute: ComputeSettings, dtype: Dtype | None) -> PreTrainedModel:
        key = folder_hash(folder), dtype
        if key not in self._bases:
            model = load_model(folder, compute=compute, dtype=dtype)
            if not self._has_room(model):
                return model
            self._bases[key] = model.to("cpu")
        return deepcopy(self._bases[key]).to(find_device(compute))

    def _has_room(self, model: PreTrainedModel) -> bool:
        return 2 * _size(model) <= self.room()


def _size(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
