"""Which models and which episodes an evaluation is of, by their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.files import file_hash
from tasks.stages.evaluate.measurement_key import Parts, key_of


def hash_folders(models: Mapping[str, Path]) -> dict[str, str]:
    from tasks.models.folders import folder_hash

    return {name: folder_hash(model) for name, model in models.items()}


def refuse_altered(models: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
    for name, found in hash_folders(models).items():
        if found != hashes[name]:
            raise ValueError(
                f"{models[name]}: its files changed while it was measured, so its episodes fit no one model. "
                f"Run `dvc repro evaluate` again."
            )


def identify_models(models: Mapping[str, Path], hashes: Mapping[str, str], parts: Parts) -> dict[str, Any]:
    from tasks.models.folders import weights_hash

    return {
        "weights": {name: weights_hash(model) for name, model in models.items()},
        "folders": dict(hashes),
        "measurement": {"parts": parts, "keys": {name: key_of(parts, model) for name, model in hashes.items()}},
    }


def hash_episodes(trajectories: Path) -> dict[str, str]:
    return {file.name: file_hash(file) for file in sorted(trajectories.glob("*.jsonl"))}
