"""A key-value cache whose rows have different lengths, behind the transformers Cache API.

One slot per live episode. Live slots are always a prefix of the storage, so a decode step reads views and copies
nothing: when an episode ends, the last live slot moves into its place. Blocks of positions shared out among rows would
waste nothing, but be gathered at every step (`rows.py` bounds the rectangle instead). Shapes: S slots, P
packed positions, N live rows, K key-value heads, T positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [S + 1, K, T, D]; the owning cache sets which positions are written and read."""

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.storage_like(key_states), self.cache.storage_like(value_states)
        self.is_initialized = True

    def resize(self, *, num_rows: int, length: int) -> None:
        """Allocate for the owner's new size; one layer after another, so that hardly more than one is there twice."""
        for name in ("keys", "values"):
            before = getattr(self, name)
            after = self.cache.storage_like(before)
            after[:num_rows, :, :length] = before[:num_rows, :, :length]
            setattr(self, name, after)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        slots, positions = self.cache.slots, self.cache.positions
        self.keys[slots, :, positions] = key_states[0].transpose(0, 1)
        self.values[slots, :, positions] = value_states[0].transpose(0, 1)
        num_rows, length = self.cache.num_rows, self.cache.length
        return self.keys[:num_rows, :, :length], self.values[:num_rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class RaggedCache(Cache):
    """The layers, and which positions the next forward writes and reads. The extra slot `nowhere` takes padding."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int):
        self.num_slots, self.capacity, self.nowhere = num_slots, capacity, num_slots
        self.slots = self.positions = torch.empty(0, dtype=torch.long)
        self.num_rows = self.length = 0
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])

    @classmethod
    def over(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> RaggedCache:
        cache = cls(len(keys), keys[0].shape[0] - 1, keys[0].shape[2])
        for layer, layer_keys, layer_values in zip(cache.layers, keys, values, strict=True):
            layer.keys, layer.values, layer.is_initialized = layer_keys, layer_values, True
        return cache

    def storage_like(self, states: Tensor) -> Tensor:
        """Keys or values of one layer, with the heads, size and type of `states`. Zeros: a forward multiplies what it
        masks by nothing, which must be a number.
        """
        return states.new_zeros(self.num_slots + 1, states.shape[1], self.capacity, states.shape[3])

    @property
    def storage(self) -> list[Tensor]:
        return [*(layer.keys for layer in self.layers), *(layer.values for layer in self.layers)]

    def resize(self, num_slots: int, capacity: int, *, num_rows: int, length: int) -> None:
        """Have so many slots of so many positions; the first rows keep their first `length` positions."""
        self.num_slots, self.capacity, self.nowhere = num_slots, capacity, num_slots
        for layer in self.layers:
            if layer.is_initialized:
                layer.resize(num_rows=num_rows, length=length)

    def allocate(self, num_heads: int, head_size: int) -> None:
        """In float32 on the CPU, unless a forward has done it."""
        if not self.is_initialized:
            example = torch.empty(1, num_heads, 0, head_size)
            for layer in self.layers:
                layer.lazy_initialization(example, example)

    def free(self) -> None:
        """Have no slot and no storage; the next `resize` and forward allocate anew."""
        self.num_slots = self.capacity = self.nowhere = 0
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    def at(self, slots: Tensor, positions: Tensor, *, num_rows: int, length: int) -> RaggedCache:
        """Make the next forward write `positions` of `slots` ([P] each) and read the first rows up to `length`."""
        self.slots, self.positions, self.num_rows, self.length = slots, positions, num_rows, length
        return self

    def fill(self, row: int, source: Sequence[Tensor], source_row: int, length: int) -> None:
        """Copy the first `length` positions of a prefilled row into a slot; `source` is like `storage`."""
        for number, layer in enumerate(self.layers):
            keys, values = source[number], source[len(self.layers) + number]
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys[row, :, :length] = keys[source_row, :, :length]
            layer.values[row, :, :length] = values[source_row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        pair, swapped = [one, other], [other, one]
        for layer in self.layers:
            layer.keys[pair, :, :length] = layer.keys[swapped, :, :length]
            layer.values[pair, :, :length] = layer.values[swapped, :, :length]
