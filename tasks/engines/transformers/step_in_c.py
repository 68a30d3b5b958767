"""The steps of a small model in C, where hundreds of small operations would cost more than their sums.

Its matrices are copies of the Hugging Face model's, laid out for C anew when torch's counters of changes say so. Which
models it may run is decided by their modules (`fits`) and then by playing (`check.py`): a model whose log-probs it does
not give is left to its own forward.

A job takes steps until a row has ended its turn, so Python has work for a turn and none for a token. Jobs run in a
thread of C, which needs no lock of Python's: the caller's thread prepares and reads those of all shards, and none waits
for another's.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import TRACED_ROTARY
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.written_turn import WrittenTurn, start_of
from tasks.models.known_modules import has_known_modules
from tasks.models.native.compiled import load_library
from tasks.models.torch_setup import is_small
from tasks.rollouts.seeds import uniforms

NORMS = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
PRODUCTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
MAX_BYTES = 32 << 20  # of weights: larger products are faster by torch's own


_Place = tuple[torch.nn.Module | None, str]  # of a tensor; None where the model has none


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "intermediate", "queries", "keys", "head_size", "words")),
        *((name, c_float) for name in ("epsilon", "scaling")),
        *((name, c_void_p) for name in ("embedding", "last_norm", "head", "cosine", "sine", "all_layers")),
    ]  # fmt: skip


class _Cache(Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("capacity", c_int64)]


class _Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_copies", "num_rows")),
        *((name, c_void_p) for name in ("copies", "rows", "slots")),
    ]


class _Job(Structure):
    _fields_ = [
        ("model", POINTER(_Model)), ("cache", POINTER(_Cache)), ("num_passes", c_int64), ("passes", POINTER(_Pass)),
        ("max_steps", c_int64), ("temperature", c_double), ("top_p", c_double), ("memory", c_void_p),
        ("num_ended", c_int64), ("ended", c_void_p),
    ]  # fmt: skip


@dataclass(slots=True)
class Pass:
    """Rows that are read together, with the slot of each; first copies, as (from a slot, to a slot, so many positions)
    one after another.
    """

    turns: Sequence[WrittenTurn]
    slots: Sequence[int]
    copies: Sequence[int] = ()


def fits(model: PreTrainedModel) -> bool:
    """Whether its modules are those that the C code computes, on a CPU in float32, and small."""
    return (
        has_known_modules(model)
        and is_small(model, MAX_BYTES)
        and (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") in TRACED_ROTARY
        and _angles(model, 1)[0].shape[1] == model.model.layers[0].self_attn.head_dim
        and _library() is not None
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library("decode_step")
    if library is not None:
        library.memory_of.restype, library.memory_of.argtypes = c_int64, [c_void_p, c_int64]
        library.run_job.restype, library.run_job.argtypes = None, [c_void_p]
        library.start_job.restype, library.start_job.argtypes = None, [c_void_p, c_void_p]
        for function in (library.wait_for, library.close_worker):
            function.restype, function.argtypes = None, [c_void_p]
        library.packed_size.restype, library.packed_size.argtypes = c_int64, [c_int64, c_int64]
        library.pack.restype, library.pack.argtypes = None, [c_void_p, c_int64, c_int64, c_void_p]
        library.open_worker.restype = c_void_p
        library.draw.restype, library.draw.argtypes = None, [c_uint64, c_int64, c_void_p]
        if any((drawn(library, seed, 3) != uniforms(seed, 3)).any() for seed in (0, 1, 2**63)):
            return None
    return library


def drawn(library: ctypes.CDLL, seed: int, count: int) -> np.ndarray:
    """The numbers that tokens are drawn with in C: those of `uniforms`, else another token would be played."""
    numbers = np.empty(count)
    library.draw(seed, count, _address(numbers))
    return numbers


class Worker:
    """What runs jobs, one at a time: a thread of C, or the one that waits. It refers to all that its job reads and
    writes, and ends before that is freed. A fork of the process has no such thread.
    """

    def __init__(self, *, has_thread: bool) -> None:
        library = _library()
        assert library is not None
        self.library, self.memory = library, np.empty(0, np.float32)
        self.job, self.read = _Job(), object()
        self.address: int | None = library.open_worker() if has_thread else None
        self.process = os.getpid()
        if has_thread and not self.address:
            raise RuntimeError("the system has no further thread for an engine's shard; end other programs")

    def memory_of(self, num_floats: int) -> int:
        """The address of as many that the job may use."""
        if len(self.memory) < num_floats:
            self.memory = np.empty(num_floats, np.float32)
        return _address(self.memory)

    def start(self, job: _Job, *, read: object) -> None:
        """A job, while `read` is what it reads."""
        self.job, self.read = job, read
        if self.process != os.getpid():
            raise RuntimeError("the engine was opened by the process that this one is a fork of; open another here")
        if self.address:
            self.library.start_job(self.address, byref(job))

    def wait(self) -> None:
        if self.address:
            self.library.wait_for(self.address)
        else:
            self.library.run_job(byref(self.job))

    def close(self) -> None:
        """After the job under way; a second time does nothing, nor does a fork."""
        if self.address and self.process == os.getpid():
            self.library.close_worker(self.address)
        self.address = None

    def __del__(self) -> None:
        self.close()


class StepInC:
    """A model that `fits`, for rows of up to `max_context` tokens. Jobs of several caches may be under way at once."""

    def __init__(self, model: PreTrainedModel, *, max_context: int, temperature: float, top_p: float):
        library = _library()
        assert library is not None
        self.library, self.model = library, model
        self.key_heads, self.head_size = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
        self.angles = _angles(model, max_context)
        self.copies: dict[_Place, np.ndarray] = {}  # of matrices
        self.places = [
            (model.model.embed_tokens, "weight"), (model.model.norm, "weight"), (model.lm_head, "weight"),
            *(place for layer in model.model.layers for place in _places_of(layer)),
        ]  # fmt: skip
        self.seen: list[tuple[int, int]] = []
        self.kinds = [_kind(tensor) for tensor in self._tensors()]
        self.take_weights()
        self.set_distribution(temperature=temperature, top_p=top_p)

    def set_distribution(self, *, temperature: float, top_p: float) -> None:
        """Of the steps from now on."""
        self.temperature, self.top_p = temperature, top_p

    def take_weights(self, *, have_changed: bool = False) -> None:
        """Look at the tensors again: at all of them where they `have_changed`, else at what torch counts as changed."""
        tensors = self._tensors()
        seen = [(0, 0) if tensor is None else (tensor.data_ptr(), tensor._version) for tensor in tensors]
        if have_changed or seen != self.seen:
            self.seen = seen
            self._lay_out(tensors)

    def _tensors(self) -> list[Tensor | None]:
        return [None if module is None else getattr(module, name) for module, name in self.places]

    def _lay_out(self, tensors: Sequence[Tensor | None]) -> None:
        """ValueError for a tensor of another kind than before: C would read or write beyond it."""
        if (kinds := [_kind(tensor) for tensor in tensors]) != self.kinds:
            changed = next(pair for pair in zip(self.kinds, kinds, strict=True) if pair[0] != pair[1])
            raise ValueError(
                f"a weight of the model became another tensor after the engine was opened: {changed[0]} is now "
                f"{changed[1]}. Open another engine."
            )
        config, layers = self.model.config, self.model.model.layers
        embedding, *others = tensors
        assert embedding is not None
        self.num_embedded = embedding.shape[0]
        last_norm, head, *in_layers = map(self._address_of, self.places[1:], others)
        self.table = np.array(in_layers, dtype=np.uint64)
        self.given = _Model(
            len(layers), config.hidden_size, config.intermediate_size, config.num_attention_heads, self.key_heads,
            self.head_size, self.model.lm_head.weight.shape[0], layers[0].input_layernorm.variance_epsilon,
            layers[0].self_attn.scaling, embedding.data_ptr(), last_norm, head,
            *(table.data_ptr() for table in self.angles), _address(self.table),
        )  # fmt: skip

    def _address_of(self, place: _Place, tensor: Tensor | None) -> int:
        """A matrix is copied."""
        if tensor is None or tensor.dim() == 1:
            return 0 if tensor is None else tensor.data_ptr()
        if place not in self.copies:
            self.copies[place] = np.empty(self.library.packed_size(*tensor.shape), np.float32)
        copy = _address(self.copies[place])
        self.library.pack(tensor.data_ptr(), *tensor.shape, copy)
        return copy

    def start(
        self, cache: RaggedCache, passes: Sequence[Pass], worker: Worker, *, max_steps: int
    ) -> Callable[[], list[int]]:
        """All passes but the last read their rows up to the last id; then the last one's rows write, until a turn is
        complete, by at most `max_steps` tokens each. A function that waits for it and returns the numbers of the rows
        that ended.
        """
        cache.allocate(self.key_heads, self.head_size)
        tensors = cache.storage
        storage = array("Q", [tensor.data_ptr() for tensor in tensors])
        where = _Cache(start_of(storage), start_of(storage) + 8 * (len(storage) // 2), cache.capacity)
        memory = worker.memory_of(self.library.memory_of(byref(self.given), cache.capacity))
        read = [_arrays(part) for part in passes]
        laid_out = (_Pass * len(passes))(*map(_pass, read))
        ended = array("q", bytes(8 * len(passes[-1].turns)))
        job = _Job(
            ctypes.pointer(self.given), ctypes.pointer(where), len(passes), laid_out, max_steps, self.temperature,
            self.top_p, memory, 0, start_of(ended),
        )  # fmt: skip
        turns = [part.turns for part in passes]
        worker.start(job, read=(self, tensors, storage, read, turns, ended))

        def finish() -> list[int]:
            worker.wait()
            return ended[: job.num_ended].tolist()

        return finish

    def check_ids(self, ids: Sequence[int]) -> None:
        """IndexError for one that the model has no embedding of."""
        if ids and not 0 <= min(ids) <= max(ids) < self.num_embedded:
            raise IndexError(f"a token id is {max(ids)}, and the model has embeddings of {self.num_embedded} tokens")


def _angles(model: PreTrainedModel, num_places: int) -> list[Tensor]:
    """Cosines and sines of the first places, [T, D] each."""
    places = torch.arange(num_places)[None]
    return [table[0].contiguous() for table in model.model.rotary_emb(torch.zeros(1), places)]


def _kind(tensor: Tensor | None) -> str:
    return (
        "none"
        if tensor is None
        else f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', strided'}"
    )


def _places_of(layer: torch.nn.Module) -> list[_Place]:
    """Where a layer's tensors are, in the order of `Layer` in decode_step.c."""
    norms = [(name, "weight") for name in NORMS]
    wanted = norms + [(name, kind) for name in PRODUCTS for kind in ("weight", "bias")]
    modules = dict(layer.named_modules())
    return [
        (modules[name] if getattr(modules.get(name), kind, None) is not None else None, kind) for name, kind in wanted
    ]


_Arrays: TypeAlias = "tuple[array[int], array[int], array[int]]"  # of a pass: copies, rows, slots


def _arrays(part: Pass) -> _Arrays:
    return array("q", part.copies), array("Q", [turn.address for turn in part.turns]), array("q", part.slots)


def _pass(arrays: _Arrays) -> _Pass:
    copies, rows, slots = arrays
    return _Pass(len(copies) // 3, len(rows), start_of(copies), start_of(rows), start_of(slots))


def _address(numbers: np.ndarray) -> int:
    return int(numbers.__array_interface__["data"][0])
