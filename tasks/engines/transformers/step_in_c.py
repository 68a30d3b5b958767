"""The forward of a small model in one call of C, where hundreds of small operations would cost more than their sums.

It reads the Hugging Face model's own tensors where they are, so a changed weight needs no word. Which models it may
run is decided by their modules (`fits`) and then by playing (`check.py`): a model whose log-probs it does not give is
left to the model's own forward. Shapes: P packed positions, N asked ones, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.models.native.compiled import load_library

FAMILIES = {
    "LlamaForCausalLM": ("LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"),
    "Qwen2ForCausalLM": ("Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP", "Qwen2RMSNorm"),
    "Qwen3ForCausalLM": ("Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"),
}
ROTARY = ("default", "linear", "llama3")  # angles that no later position changes
NORMS = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
PRODUCTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
MAX_BYTES = 32 << 20  # of weights: larger products are faster by torch's own


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
        *((name, c_int64) for name in ("num_positions", "num_asked")),
        *((name, c_void_p) for name in ("ids", "places", "slots", "asked", "noise")),
        ("temperature", c_double),
        *((name, c_void_p) for name in ("tokens", "logps", "logits")),
    ]


@dataclass(frozen=True, slots=True)
class Positions:
    """Ids, and where each is: its place in its row, and the row's slot. [P] each, a row's in order."""

    ids: Sequence[int]
    places: Sequence[int]
    slots: Sequence[int]


def fits(model: PreTrainedModel) -> bool:
    """Whether its modules are those that the C code computes, on a CPU in float32, and small."""
    config, tensors = model.config, [*model.parameters()]
    names = FAMILIES.get(type(model).__name__)
    if names is None or any(item.dtype != torch.float32 or item.device.type != "cpu" for item in tensors):
        return False
    known = {type(model).__name__, *names, f"{names[0].removesuffix('Model')}RotaryEmbedding"}
    known |= {"Linear", "Embedding", "ModuleList", "SiLUActivation"}
    return (
        {type(module).__name__ for module in model.modules()} <= known
        and all(item.is_contiguous() for item in tensors)
        and sum(item.numel() * item.element_size() for item in tensors) <= MAX_BYTES
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ROTARY
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and _library() is not None
    )


def _library() -> ctypes.CDLL | None:
    library = load_library("decode_step")
    if library is not None:
        library.memory_of.restype = c_int64
        library.memory_of.argtypes = [POINTER(_Model), c_int64]
        library.run_step.restype = None
        library.run_step.argtypes = [POINTER(_Model), POINTER(_Cache), POINTER(_Step), c_void_p]
    return library


class StepInC:
    """A model that `fits`, for rows of up to `max_context` tokens. Several threads may call it at once, each with a
    cache of its own.
    """

    def __init__(self, model: PreTrainedModel, *, max_context: int):
        library = _library()
        assert library is not None
        self.library, self.model = library, model
        attention = model.model.layers[0].self_attn
        self.key_heads, self.head_size = model.config.num_key_value_heads, attention.head_dim
        places = torch.arange(max_context)[None]
        self.angles = [table[0].contiguous() for table in model.model.rotary_emb(torch.zeros(1), places)]
        ends = [(model.model.embed_tokens, "weight"), (model.model.norm, "weight"), (model.lm_head, "weight")]
        self.places = [*ends, *(place for layer in model.model.layers for place in _tensors(layer))]
        self.pointers: list[int] = []
        self.take_weights()

    def take_weights(self) -> None:
        """Look up where the tensors are: needed after some were replaced, not after changes in place."""
        pointers = [0 if module is None else getattr(module, name).data_ptr() for module, name in self.places]
        if pointers != self.pointers:
            self.pointers = pointers
            self._point_to_tensors()

    def _point_to_tensors(self) -> None:
        config, layers = self.model.config, self.model.model.layers
        embedding, last_norm, head, *in_layers = self.pointers
        self.table = np.array(in_layers, dtype=np.uint64)
        self.given = _Model(
            len(layers), config.hidden_size, config.intermediate_size, config.num_attention_heads, self.key_heads,
            self.head_size, self.model.lm_head.weight.shape[0], layers[0].input_layernorm.variance_epsilon,
            layers[0].self_attn.scaling, embedding, last_norm, head,
            *(table.data_ptr() for table in self.angles), _address(self.table),
        )  # fmt: skip

    def read(self, cache: RaggedCache, positions: Positions) -> None:
        """Keys and values of these positions into the cache."""
        self._run(cache, positions, asked=[], noise=[], temperature=1.0)

    def sample(
        self,
        cache: RaggedCache,
        positions: Positions,
        *,
        asked: Sequence[int],
        noise: Sequence[float],
        temperature: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """A token after each asked position and its log-prob (nats), as `sample_tokens` without a nucleus: [N] each."""
        tokens, logps = np.empty(len(asked), np.int64), np.empty(len(asked), np.float32)
        self._run(
            cache, positions, asked=asked, noise=noise, temperature=temperature, tokens=_address(tokens),
            logps=_address(logps),
        )  # fmt: skip
        return tokens, logps

    def logits(self, cache: RaggedCache, positions: Positions, *, asked: Sequence[int]) -> Tensor:
        """[N, V], after each asked position."""
        logits = torch.empty(len(asked), self.given.words)
        self._run(cache, positions, asked=asked, noise=[], temperature=1.0, logits=logits.data_ptr())
        return logits

    def _run(
        self,
        cache: RaggedCache,
        positions: Positions,
        *,
        asked: Sequence[int],
        noise: Sequence[float],
        temperature: float,
        **results: int,
    ) -> None:
        cache.allocate(self.key_heads, self.head_size)
        storage = np.array([tensor.data_ptr() for tensor in cache.storage], dtype=np.uint64)
        half = storage.nbytes // 2
        given = [np.array(numbers, np.int64) for numbers in (positions.ids, positions.places, positions.slots, asked)]
        uniform = np.array(noise, np.float64)
        step = _Step(
            len(given[0]), len(asked), *map(_address, given), _address(uniform), temperature, **results
        )  # fmt: skip
        memory = np.empty(self.library.memory_of(self.given, cache.capacity), np.float32)
        where = _Cache(_address(storage), _address(storage) + half, cache.capacity)
        self.library.run_step(byref(self.given), byref(where), byref(step), _address(memory))


def _tensors(layer: torch.nn.Module) -> list[tuple[torch.nn.Module | None, str]]:
    """Where a layer's tensors are, in the order of `Layer` in decode_step.c; None where one is missing."""
    norms = [(name, "weight") for name in NORMS]
    wanted = norms + [(name, kind) for name in PRODUCTS for kind in ("weight", "bias")]
    modules = dict(layer.named_modules())
    return [
        (modules[name] if getattr(modules.get(name), kind, None) is not None else None, kind) for name, kind in wanted
    ]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
