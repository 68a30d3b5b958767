"""The model a run would start from, without its weights: tokenizer, config.json, and sizes from safetensors headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.models.embedded import is_embedded
from tasks.models.files import POINTER


@dataclass(frozen=True, slots=True)
class Model:
    source: str
    tokenizer: Any
    config: dict[str, Any]
    num_parameters: int


def assessed_folder(paths: Paths, model_path: str) -> Path | None:
    """`assess`'s base model, where it is the one that params.yaml names now. A warm start has its
    tokenizer and shape.
    """
    base = paths.base_model
    if not base.exists():
        return None
    pointer = base / POINTER
    is_current = read_json(pointer)["path"] == model_path if pointer.exists() else is_embedded(model_path)
    return base if is_current else None
