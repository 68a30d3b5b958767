"""The test trajectories a registered version carries (`lineage/test_trajectories.jsonl.gz`), fetched and unpacked.

They are what the version was promoted on, so two versions can be compared after the run that made either is gone. Left
out: the weights (`registry.py`), and versions from before trajectories were kept, which have none to fetch.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.storage import atomic_file, content_hash
from tasks.tracking.connection import TrackingSettings, connect, mlflow_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient

SCHEME = "models:/"
REFERENCE = re.compile(r"models:/(?P<model>[^/:@'\"]+)(?:@(?P<alias>[^/:@]+)|/(?P<version>\d+))")
STORED = "lineage/test_trajectories.jsonl.gz"
HASHES_TAG = "lineage_files"  # {name: hash}, written when the version was registered


@dataclass(frozen=True, slots=True)
class VersionEpisodes:
    """A registered version, what its tags tell, and its test trajectories as a JSONL file."""

    model: str
    version: int
    tags: dict[str, str]
    trajectories: Path


def fetch_test_trajectories(settings: TrackingSettings, reference: str, folder: Path) -> VersionEpisodes:
    """Unpack them to FOLDER/NAME-N.jsonl. `reference` is models:/NAME@alias or models:/NAME/N; ValueError if there is
    no such version, or it carries none.
    """
    parts = REFERENCE.fullmatch(reference)
    if parts is None:
        raise ValueError(
            f"{reference!r} names no model version. Write models:/NAME@champion, or models:/NAME/3 for version 3."
        )
    with mlflow_errors(settings):
        found = _find(connect(settings), reference, parts)
        file = folder / f"{_safe(found.name)}-{found.version}.jsonl"
        _unpack(found, file)
    return VersionEpisodes(found.name, int(found.version), dict(found.tags), file)


def _find(client: MlflowClient, reference: str, parts: re.Match[str]) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        if parts["alias"]:
            return client.get_model_version_by_alias(parts["model"], parts["alias"])
        return client.get_model_version(parts["model"], parts["version"])
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ValueError(
            f"{reference}: the registry has no such version ({' '.join(str(error).split())[:200]}). "
            f"`mlflow ui` shows those there are."
        ) from None


def _unpack(found: Any, file: Path) -> None:
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    name = f"{found.name} version {found.version}"
    with tempfile.TemporaryDirectory() as temporary:
        try:
            packed = download_artifacts(f"{SCHEME}{found.name}/{found.version}/{STORED}", dst_path=temporary)
        except (MlflowException, OSError):
            raise ValueError(
                f"{name} carries no {STORED}: it was registered before versions kept their trajectories, or its files "
                f"are gone. Name the evaluate folder of the run that made it instead."
            ) from None
        expected = json.loads(found.tags.get(HASHES_TAG, "{}")).get(Path(STORED).name)
        if expected not in (None, content_hash(Path(packed))):
            raise ValueError(
                f"{name}: its {STORED} is not the one that was registered, so it shows nothing about it. "
                f"Restore MLflow's artifacts from a backup."
            )
        try:
            with gzip.open(packed) as source, atomic_file(file) as target, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except (EOFError, gzip.BadGzipFile):
            raise ValueError(f"{name}: its {STORED} is damaged. Restore MLflow's artifacts from a backup.") from None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
