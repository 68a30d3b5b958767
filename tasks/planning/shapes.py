"""The sizes of a model that its memory and its arithmetic depend on, from config.json or from a name.

Where the weights are there and whole, their headers say how many there are; else decoders are counted by formula. Of a
mixture of experts memory has all, and arithmetic those that a token passes; every layer is taken for one of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.files import names_in
from tasks.core.urls import local_path
from tasks.models.embedded import is_embedded
from tasks.models.files import POINTER, read_header, refuse_other_dtypes, weight_files
from tasks.models.folders import is_adapter, model_config, resolve_model
from tasks.models.settings import EmbeddedModelSettings, LoRASettings, ModelSettings
from tasks.models.tokenizer_files import check_tokenizer

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
}
# Families' names of the number of experts, of those a token passes, and of the inner size of the shared ones.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")
# From the published config.json of each: layers, hidden, inner, heads, key-value heads, head size, vocabulary, tied.
KNOWN: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 4864, 14, 2, 64, 151_936, True),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 8960, 12, 2, 128, 151_936, True),
    "Qwen2.5-3B": ("qwen2", 36, 2048, 11_008, 16, 2, 128, 151_936, True),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064, False),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, True),
    "Qwen3-4B": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, True),
    "Qwen3-8B": ("qwen3", 36, 4096, 12_288, 32, 8, 128, 151_936, False),
    "Llama-3.1-8B": ("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, False),
}
PUBLISHED_DTYPE = "bfloat16"  # of all of these

QUANTIZED = ("awq", "gptq", "gguf", "int4", "int8", "4bit", "8bit", "fp8")  # in names of published folders
EMBEDDED_VOCABULARY = 700  # about, before it is built


class UnknownShape(ValueError):
    """No config.json and no known name, or a config.json without a size that the estimates need."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a layer: how many there are, how many a token passes, the inner size of one, and that of the shared ones."""

    total: int
    active: int
    inner: int
    shared: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`inner` is what a token passes, of experts too. `num_parameters` counts tied embeddings once. `stored` is the
    dtype of its files, and so of snapshots.
    """

    name: str
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary: int
    num_parameters: int
    stored: str
    experts: Experts | None = None

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of one layer; experts have tensors of three dimensions instead."""
        inner = self.experts.shared if self.experts else self.inner
        queries, keys = self.num_heads * self.head_size, self.num_key_value_heads * self.head_size
        attention = {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }
        mlp = {"gate_proj": (self.hidden, inner), "up_proj": (self.hidden, inner), "down_proj": (inner, self.hidden)}
        return attention | (mlp if inner else {})

    @property
    def linear_parameters(self) -> int:
        return self.num_layers * sum(math.prod(sizes) for sizes in self.linear_layers.values())

    @property
    def matrix_parameters(self) -> int:
        """Of the matrices inside the layers that a token passes."""
        return self.linear_parameters + (self._of_experts(self.experts.active) if self.experts else 0)

    @property
    def expert_parameters(self) -> int:
        """Of all experts, and of the router that chooses between them."""
        if self.experts is None:
            return 0
        return self._of_experts(self.experts.total) + self.num_layers * self.hidden * self.experts.total

    def _of_experts(self, number: int) -> int:
        assert self.experts is not None
        return 3 * self.num_layers * self.hidden * self.experts.inner * number

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def key_value_elements(self) -> int:
        """Numbers that the cache keeps of one token."""
        return 2 * self.num_layers * self.num_key_value_heads * self.head_size

    def adapter_parameters(self, lora: LoRASettings) -> int:
        """A·B of every adapted matrix: rank × (inputs + outputs). With all-linear PEFT adapts the experts of most
        families too; they are counted for all.
        """
        chosen = self.linear_layers if lora.target_modules == "all-linear" else lora.target_modules
        sizes = sum(sum(self.linear_layers.get(name, (0, 0))) for name in chosen)
        if self.experts and lora.target_modules == "all-linear":
            # Of an expert its gate and up, which are one tensor, have twice the rank; the router has its own.
            one = 2 * (self.hidden + 2 * self.experts.inner) + self.experts.inner + self.hidden
            sizes += self.experts.total * one + self.hidden + self.experts.total
        return self.num_layers * lora.rank * sizes


def shape_of(model: ModelSettings) -> Shape:
    return embedded_shape(model.embedded) if is_embedded(model.path) else find_shape(model.path)


def find_shape(model: str) -> Shape:
    """Of a model folder, or of a known name such as `Qwen2.5-7B`, for which nothing need be downloaded."""
    folder = local_path(model)
    if (folder / "config.json").exists() or (folder / POINTER).exists():
        return folder_shape(folder)
    if any(mark in model.lower() for mark in QUANTIZED):
        raise UnknownShape(_is_quantized(model))
    found = known_name(model)
    if found is None:
        raise UnknownShape(
            f"{model!r} is neither a model folder nor a model whose shape is known, so nothing can be planned. Give a "
            f"folder with a config.json, or one of: {', '.join(KNOWN)}."
        )
    return known_shape(found)


def known_name(model: str) -> str | None:
    """The known model that a path or a hub's name means: `models/Qwen2.5-7B-Instruct` is a Qwen2.5-7B."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    names = sorted(KNOWN, key=len, reverse=True)
    return next((name for name in names if last == name.lower() or last.startswith(f"{name.lower()}-")), None)


def known_shape(name: str) -> Shape:
    family, layers, hidden, inner, heads, key_value_heads, head_size, vocabulary, is_tied = KNOWN[name]
    config = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": head_size,
        "vocab_size": vocabulary, "tie_word_embeddings": is_tied, "dtype": PUBLISHED_DTYPE,
    }  # fmt: skip
    return config_shape(name, config)


def embedded_shape(settings: EmbeddedModelSettings) -> Shape:
    config = {"model_type": "qwen3", "vocab_size": EMBEDDED_VOCABULARY, "tie_word_embeddings": True}
    return config_shape("the embedded model", config | settings.model_dump())


def folder_shape(folder: Path) -> Shape:
    """ValueError where the weights or the tokenizer beside them cannot be played, as far as headers and JSON say."""
    config = model_config(folder)
    if config.get("quantization_config"):
        raise UnknownShape(_is_quantized(str(folder)))
    found = resolve_model(folder)
    by_formula = config_shape(str(folder), config.get("text_config", config))
    if is_adapter(found) or not names_in(found, ".safetensors"):
        return by_formula
    check_tokenizer(found)
    num_parameters = count_parameters(found)
    if num_parameters != by_formula.num_parameters:  # only then, since it takes seconds: all of transformers
        from tasks.models.empty_model import check_tensors

        check_tensors(found)
    return replace(by_formula, num_parameters=num_parameters)


def _is_quantized(model: str) -> str:
    return (
        f"{model} has quantized weights, and only float32, float16 and bfloat16 are trained here, so nothing can be "
        f"planned for it. Take the model it was made from."
    )


def config_shape(name: str, config: Mapping[str, Any], *, num_parameters: int | None = None) -> Shape:
    """UnknownShape where config.json lacks a size."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    experts, inner = _experts(config), config.get("intermediate_size") or 4 * hidden
    without_count = Shape(
        name=name,
        num_layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        inner=experts.active * experts.inner + experts.shared if experts else inner,
        num_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        vocabulary=_size(config, "vocab_size"),
        num_parameters=num_parameters or 0,
        stored=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        experts=experts,
    )
    return without_count if num_parameters else _counted(without_count, config)


def _experts(config: Mapping[str, Any]) -> Experts | None:
    """None for a dense decoder, and where a token passes all that there are."""
    total, active = _first(config, NUM_EXPERTS), _first(config, ACTIVE_EXPERTS)
    if not active or total <= active:
        return None
    inner = config.get("moe_intermediate_size") or _size(config, "intermediate_size")
    shared = _first(config, SHARED_SIZES) or inner * (config.get("n_shared_experts") or 0)
    return Experts(total, active, inner, shared)


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first number under these names, 0 where there is none."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _counted(shape: Shape, config: Mapping[str, Any]) -> Shape:
    """With the parameters of a decoder: matrices, embeddings, norms, and biases of Qwen 2's queries to values."""
    outputs = shape.linear_layers
    biases = sum(outputs[name][1] for name in ("q_proj", "k_proj", "v_proj")) if _has_biases(config) else 0
    norms = 2 * shape.hidden + (2 * shape.head_size if config.get("model_type") in ("qwen3", "qwen3_moe") else 0)
    embeddings = shape.head_parameters * (1 if config.get("tie_word_embeddings") else 2)
    inside = shape.linear_parameters + shape.expert_parameters + shape.num_layers * (biases + norms)
    return replace(shape, num_parameters=inside + embeddings + shape.hidden)


def _has_biases(config: Mapping[str, Any]) -> bool:
    return bool(config.get("attention_bias", config.get("model_type") == "qwen2"))


def _size(config: Mapping[str, Any], name: str) -> int:
    found = next((config[key] for key in (name, *OTHER_NAMES.get(name, ())) if config.get(key)), None)
    if found is None:
        raise UnknownShape(
            f"the model's config.json contains no {name}, which this estimate needs. Watch memory and time of the "
            f"first iterations; nothing here can estimate them."
        )
    return int(found)


def count_parameters(folder: Path) -> int:
    """From the headers of the files that are loaded; no weight is read. ValueError where they are not whole, or of a
    dtype that is not computed in.
    """
    files = weight_files(folder, is_adapter=False)
    refuse_other_dtypes(folder, files)
    return sum(math.prod(sizes) for file in files for _, _, sizes in read_header(file))
