"""The command `fetch`: a registered version as a folder that transformers and vLLM load, its weights verified."""

from __future__ import annotations

from pathlib import Path

from tasks.tracking.model_uri import find_version


def fetch(uri: str, folder: Path, address: str | None = None) -> str:
    _refuse_what_is_there(folder)
    registry, version = find_version(uri, address)
    registry.fetch(version, folder)
    known = f"weights {version.weights[:12]} as registered"
    unknown = "it has no hash of its weights, so they cannot be verified"
    return f"{uri} is version {version.version}, {known if version.weights else unknown}: {folder}"


def _refuse_what_is_there(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder}: is not an empty folder, and fetch overwrites nothing. Name another folder.")
