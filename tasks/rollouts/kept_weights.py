"""Weights between the turns of models that play in one engine, which lives in the caller's memory.

A model's files are copied tensor by tensor into the engine's own model, so a snapshot of the same architecture costs a
copy: no model is built, nothing is traced. The system's cache of files is what keeps them between two turns. Only what
no file has is kept in host memory, where twice its size is left free: a model with an adapter merged in, and one whose
files name their tensors otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.models.adapters import merge_into
from tasks.models.files import map_tensors
from tasks.models.folders import (
    folder_hash,
    is_adapter,
    load_model,
    read_updates,
    resolve_model,
    stored_dtype,
    weights_hash,
)
from tasks.models.settings import ComputeSettings

if TYPE_CHECKING:
    from torch import Size, Tensor
    from transformers import PreTrainedModel

Weights = dict[str, "Tensor"]


class KeptWeights:
    """`room` says how many bytes of host memory are free. Weights are keyed by the hash of their model's files."""

    def __init__(self, room: Callable[[], float]):
        self.room = room
        self._expected: set[str] = set()
        self._weights: dict[str, Weights] = {}
        self._bases: dict[str, Weights] = {}

    def expect(self, folders: Iterable[Path]) -> None:
        """These models may play again; the weights of all others are let go."""
        self._expected = set(map(folder_hash, folders))
        self._weights = {key: weights for key, weights in self._weights.items() if key in self._expected}

    def load(self, folder: Path, *, compute: ComputeSettings) -> PreTrainedModel:
        """A model that the caller may fill with others' weights."""
        model = load_model(folder, compute=compute, load_base=self._load_base)
        found, key = resolve_model(folder), folder_hash(folder)
        if key in self._expected and (is_adapter(found) or not _is_as_in_files(model, found)):
            self._weights[key] = self._copies(model)
        return model

    def fill(self, model: PreTrainedModel, folder: Path) -> bool:
        """Give the model the weights in `folder`, whose config it has. False, and nothing changed, where these are
        others than the model's by name or shape: a head of its own may replace a tied one, and some families' files
        name their tensors otherwise. After a ValueError it may have some of them.
        """
        key = folder_hash(folder)
        if kept := self._weights.get(key):
            return _copy(kept, model)
        weights_hash(folder)  # refuses missing files and another base than the adapter's
        base, updates = read_updates(resolve_model(folder))
        base_key = folder_hash(base)
        weights = self._weights.get(base_key) or self._bases.get(base_key) or map_tensors(base)
        if not _copy(weights, model):
            return False
        for update in updates:
            merge_into(model, update, dtype=stored_dtype(base))
        if updates and key in self._expected:
            self._weights[key] = self._copies(model)
        return True

    def _load_base(self, folder: Path, *, compute: ComputeSettings, dtype: None) -> PreTrainedModel:
        model = load_model(folder, compute=compute, dtype=dtype)
        if not _is_as_in_files(model, folder):
            self._bases[folder_hash(folder)] = self._copies(model)
        return model

    def _copies(self, model: PreTrainedModel) -> Weights:
        """None of them where twice their size is not left free."""
        places = _places(model)
        size = sum(tensor.numel() * tensor.element_size() for tensor in places.values())
        if 2 * size > self.room():
            return {}
        return {name: tensor.to("cpu", copy=True) for name, tensor in places.items()}


def _places(model: PreTrainedModel) -> Weights:
    """The tensors of a model that its files contain, a tied one once."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed([*tensors.items()])}
    return {name: tensor.detach() for name, tensor in tensors.items() if first[id(tensor)] == name}


def _copy(weights: Weights, model: PreTrainedModel) -> bool:
    places = _places(model)
    if _shapes(weights) != _shapes(places):
        return False
    for name, place in places.items():
        place.copy_(weights[name])
    return True


def _is_as_in_files(model: PreTrainedModel, folder: Path) -> bool:
    """Whether a whole model's tensors have the names and shapes that they have in its folder."""
    return _shapes(map_tensors(folder)) == _shapes(_places(model))


def _shapes(weights: Weights) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
