"""The forward of a small model in one call of C, where hundreds of small operations would cost more than their sums.

Its matrices are copies of the Hugging Face model's, laid out for C anew when torch's counters of changes say so. Which
models it may run is decided by their modules (`fits`) and then by playing (`check.py`): a model whose log-probs it does
not give is left to its own forward. Shapes: P packed positions, N asked ones, V vocabulary.

Steps run in a thread of C, which needs no lock of Python's: the caller's thread prepares and reads the steps of all
shards, and none waits for another's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import TRACED_ROTARY
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.models.native.compiled import load_library
from tasks.models.torch_setup import is_small
from tasks.rollouts.sampling import sample_tokens

FAMILIES = {
    "LlamaForCausalLM": ("LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"),
    "Qwen2ForCausalLM": ("Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP", "Qwen2RMSNorm"),
    "Qwen3ForCausalLM": ("Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"),
}
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


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_copies", "num_positions", "num_asked")),
        *((name, c_void_p) for name in ("copies", "ids", "places", "slots", "asked", "noise")),
        ("temperature", c_double),
        *((name, c_void_p) for name in ("tokens", "logps", "logits")),
    ]


@dataclass(slots=True)
class Work:
    """What a step does: first copies, as (from a slot, to a slot, so many positions) one after another, then positions,
    a row's in order ([P] each); after each of the `asked` ones it samples a token, with a number of `noise`.
    """

    copies: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def add(self, ids: list[int], *, slot: int, first: int) -> None:
        """Positions of a row from its place `first`."""
        self.ids += ids
        if len(ids) == 1:
            self.places.append(first)
            self.slots.append(slot)
        else:
            self.places += range(first, first + len(ids))
            self.slots += [slot] * len(ids)


def fits(model: PreTrainedModel) -> bool:
    """Whether its modules are those that the C code computes, on a CPU in float32, and small."""
    config, tensors = model.config, [*model.parameters()]
    names = FAMILIES.get(type(model).__name__)
    if names is None or any(item.dtype != torch.float32 for item in tensors):
        return False
    known = {type(model).__name__, *names, f"{names[0].removesuffix('Model')}RotaryEmbedding"}
    known |= {"Linear", "Embedding", "ModuleList", "SiLUActivation"}
    return (
        {type(module).__name__ for module in model.modules()} <= known
        and all(item.is_contiguous() for item in tensors)
        and is_small(model, MAX_BYTES)
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type") in TRACED_ROTARY
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and _library() is not None
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library("decode_step")
    if library is not None:
        library.memory_of.restype, library.memory_of.argtypes = c_int64, [c_void_p, c_int64]
        job: list[Any] = [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]
        library.run_steps.restype, library.run_steps.argtypes = None, job
        library.start_steps.restype, library.start_steps.argtypes = None, [c_void_p, *job]
        for function in (library.wait_for, library.close_worker):
            function.restype, function.argtypes = None, [c_void_p]
        library.packed_size.restype, library.packed_size.argtypes = c_int64, [c_int64, c_int64]
        library.pack.restype, library.pack.argtypes = None, [c_void_p, c_int64, c_int64, c_void_p]
        library.open_worker.restype = c_void_p
    return library


class Worker:
    """A thread of C. It refers to all that its steps read and write, and ends before that is freed."""

    def __init__(self) -> None:
        library = _library()
        assert library is not None
        self.library, self.read = library, object()
        self.address: int | None = library.open_worker()
        if not self.address:
            raise RuntimeError("the system has no further thread for an engine's shard; end other programs")

    def start(self, job: Sequence[Any], *, read: object) -> None:
        """Steps, while `read` is what they read."""
        self.read = read
        self.library.start_steps(self.address, *job)

    def wait(self) -> None:
        self.library.wait_for(self.address)

    def close(self) -> None:
        """After the steps under way; a second time does nothing."""
        if self.address:
            self.library.close_worker(self.address)
            self.address = None

    def __del__(self) -> None:
        self.close()


class StepInC:
    """A model that `fits`, for rows of up to `max_context` tokens. Steps of several caches may be under way at once."""

    def __init__(self, model: PreTrainedModel, *, max_context: int, temperature: float, top_p: float):
        library = _library()
        assert library is not None
        self.library, self.model = library, model
        self.key_heads, self.head_size = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
        places = torch.arange(max_context)[None]
        self.angles = [table[0].contiguous() for table in model.model.rotary_emb(torch.zeros(1), places)]
        self.copies: dict[_Place, np.ndarray] = {}  # of matrices
        self.places = [
            (model.model.embed_tokens, "weight"), (model.model.norm, "weight"), (model.lm_head, "weight"),
            *(place for layer in model.model.layers for place in _tensors(layer)),
        ]  # fmt: skip
        self.seen: list[tuple[int, int]] = []
        self.take_weights()
        self.set_distribution(temperature=temperature, top_p=top_p)

    def set_distribution(self, *, temperature: float, top_p: float) -> None:
        """Of the steps from now on."""
        self.temperature, self.top_p, self.has_nucleus = temperature, top_p, temperature > 0 and top_p < 1

    def take_weights(self, *, have_changed: bool = False) -> None:
        """Look at the tensors again: at all of them where they `have_changed`, else at what torch counts as changed."""
        tensors = [None if module is None else getattr(module, name) for module, name in self.places]
        seen = [(0, 0) if tensor is None else (tensor.data_ptr(), tensor._version) for tensor in tensors]
        if have_changed or seen != self.seen:
            self.seen = seen
            self._lay_out(tensors)

    def _lay_out(self, tensors: Sequence[Tensor | None]) -> None:
        config, layers = self.model.config, self.model.model.layers
        embedding, *others = tensors
        last_norm, head, *in_layers = map(self._address_of, self.places[1:], others)
        assert embedding is not None
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
        self, cache: RaggedCache, works: Sequence[Work], worker: Worker | None
    ) -> Callable[[], tuple[list[int], list[float]]]:
        """Steps one after another; a function that waits for them and returns the last one's tokens and log-probs
        (nats, under the distribution sampled from). Without a worker they run in the thread that calls it. IndexError
        for an id that the model has no embedding of.
        """
        cache.allocate(self.key_heads, self.head_size)
        tensors = cache.storage
        storage = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        address = _address(storage)
        where = _Cache(address, address + storage.nbytes // 2, cache.capacity)
        tokens, logps = np.empty(len(works[-1].asked), np.int64), np.empty(len(works[-1].asked), np.float32)
        logits = torch.empty(len(tokens), self.given.words) if self.has_nucleus else None
        arrays = [self._arrays(work) for work in works]
        steps = (_Step * len(works))(*map(self._step, works, arrays))
        steps[-1].tokens, steps[-1].logps = _address(tokens), _address(logps)
        steps[-1].logits = None if logits is None else logits.data_ptr()
        memory = np.empty(self.library.memory_of(byref(self.given), cache.capacity), np.float32)
        job = byref(self.given), byref(where), byref(steps), len(works), _address(memory)
        read = (
            self.given,
            self.table,
            self.copies,
            tensors,
            storage,
            arrays,
            tokens,
            logps,
            logits,
            memory,
            where,
            steps,
        )
        if worker is not None:
            worker.start(job, read=read)

        def finish() -> tuple[list[int], list[float]]:
            if worker is not None:
                worker.wait()
            else:
                self.library.run_steps(*job)
                assert read  # until here
            if logits is None:
                return tokens.tolist(), logps.tolist()
            noise = torch.from_numpy(arrays[-1][-1])
            ids, chosen = sample_tokens(logits, noise, temperature=self.temperature, top_p=self.top_p)
            return ids.tolist(), chosen.tolist()

        return finish

    def _arrays(self, work: Work) -> list[np.ndarray]:
        counts = work.copies, work.ids, work.places, work.slots, work.asked
        arrays = [np.array(numbers, np.int64) for numbers in counts]
        ids, num_embedded = arrays[1], self.model.model.embed_tokens.weight.shape[0]
        if ids.size and not 0 <= ids.min() <= ids.max() < num_embedded:
            raise IndexError(f"a token id is {ids.max()}, and the model has embeddings of {num_embedded} tokens")
        return [*arrays, np.array(work.noise, np.float64)]

    def _step(self, work: Work, arrays: Sequence[np.ndarray]) -> _Step:
        return _Step(
            len(work.copies) // 3, len(work.ids), len(work.asked), *map(_address, arrays), self.temperature
        )  # fmt: skip


def _tensors(layer: torch.nn.Module) -> list[_Place]:
    """Where a layer's tensors are, in the order of `Layer` in decode_step.c."""
    norms = [(name, "weight") for name in NORMS]
    wanted = norms + [(name, kind) for name in PRODUCTS for kind in ("weight", "bias")]
    modules = dict(layer.named_modules())
    return [
        (modules[name] if getattr(modules.get(name), kind, None) is not None else None, kind) for name, kind in wanted
    ]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
