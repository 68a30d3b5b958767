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
