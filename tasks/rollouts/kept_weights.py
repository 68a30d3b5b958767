"""Weights in host memory between the turns of models that play in one engine, which lives in the caller's memory.

A model's files are copied tensor by tensor into the engine's own model, so a snapshot of the same architecture costs a
copy: no model is built, nothing is traced. Weights are kept where their model is expected to play
again and twice their size is left free; else files are read again. So is the base of LoRA snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.models.adapters import merge_into
from tasks.models.files import copy_tensors
from tasks.models.folders import folder_hash, load_model, read_updates, resolve_model, stored_dtype, weights_hash
from tasks.models.settings import ComputeSettings

if TYPE_CHECKING:
    from torch import Tensor
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
        self._keep(folder_hash(folder), model)
        return model

    def fill(self, model: PreTrainedModel, folder: Path) -> bool:
        """Give the model the weights in `folder`, whose config it has. False, and nothing changed, where these are
        others than the model's by name or shape: a head of its own may replace a tied one, and some families' files
        name their tensors otherwise. After a ValueError it may have some of them.
        """
        key = folder_hash(folder)
        if key in self._weights:
            return _copy(self._weights[key], model)
        weights_hash(folder)  # refuses missing files and another base than the adapter's
        base, updates = read_updates(resolve_model(folder))
        base_key = folder_hash(base)
        weights = self._weights.get(base_key) or self._bases.get(base_key)
        is_filled = _copy(weights, model) if weights else copy_tensors(base, _places(model))
        if not is_filled:
            return False
        if updates and self.has_room(model):
            self._bases[base_key] = weights or _copies(model)
        for update in updates:
            merge_into(model, update, dtype=stored_dtype(base))
        self._keep(key, model)
        return True

    def _load_base(self, folder: Path, *, compute: ComputeSettings, dtype: None) -> PreTrainedModel:
        model = load_model(folder, compute=compute, dtype=dtype)
        if self.has_room(model):
            self._bases[folder_hash(folder)] = _copies(model)
        return model

    def _keep(self, key: str, model: PreTrainedModel) -> None:
        if key in self._expected and self.has_room(model):
            self._weights[key] = _copies(model)

    def has_room(self, model: PreTrainedModel) -> bool:
        """Whether twice its size is left free."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in _places(model).values())
        return 2 * size <= self.room()


def _places(model: PreTrainedModel) -> Weights:
    """The tensors of a model that its files contain, a tied one once."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed([*tensors.items()])}
    return {name: tensor.detach() for name, tensor in tensors.items() if first[id(tensor)] == name}


def _copies(model: PreTrainedModel) -> Weights:
    return {name: tensor.to("cpu", copy=True) for name, tensor in _places(model).items()}


def _copy(weights: Weights, model: PreTrainedModel) -> bool:
    places = _places(model)
    if {name: tensor.shape for name, tensor in weights.items()} != {name: to.shape for name, to in places.items()}:
        return False
    for name, place in places.items():
        place.copy_(weights[name])
    return True
