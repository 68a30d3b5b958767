"""The model a run would start from, without its weights: tokenizer, config.json, and sizes from safetensors headers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.models.embedded import is_embedded
from tasks.models.files import POINTER, loading


@dataclass(frozen=True, slots=True)
class Model:
    source: str
    tokenizer: Any
    config: dict[str, Any]
    num_parameters: int


def trained_folder(paths: Paths, model_path: str) -> Path | None:
    """The warm start, or else `assess`'s base model, where they come from the model that params.yaml names now."""
    base, warm = paths.stage("assess") / "base_model", paths.stage("warm_start") / "model"
    if not base.exists():
        return None
    pointer = base / POINTER
    is_current = read_json(pointer)["path"] == model_path if pointer.exists() else is_embedded(model_path)
    if not is_current:
        return None
    return warm if warm.exists() else base


def num_parameters(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with loading(folder, file.name), safe_open(file, framework="np") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in list(tensors.keys()))
    return total


def dense_parameters(config: dict[str, Any]) -> int:
    """The same for a model that is not built yet, with tied embeddings; norms are not counted."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    key_values = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    a_layer = 2 * hidden * hidden + 2 * hidden * key_values + 3 * hidden * config["intermediate_size"]
    return int(config["vocab_size"] * hidden + layers * a_layer)
