"""The test trajectories a registered version carries, fetched, verified and unpacked.

They are what the version was promoted on, so two versions can be compared after the run that made either is gone. Left
out: the weights (`registry.py`), and versions from before trajectories were kept, which have none to fetch.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tasks.core.files import atomic_file
from tasks.tracking.model_uri import find_version
from tasks.tracking.versions import LINEAGE, TRAJECTORIES_FILE, Version

SCHEME = "models:/"


@dataclass(frozen=True, slots=True)
class VersionEpisodes:
    """A registered version, and its test trajectories as a JSONL file."""

    version: Version
    trajectories: Path


def fetch_test_trajectories(uri: str, folder: Path) -> VersionEpisodes:
    """Unpack them to FOLDER/NAME-N.jsonl; ValueError where there is no such version, or it carries none."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # of one small file
    registry, version = find_version(uri)
    file = folder / f"{_safe(version.model)}-{version.version}.jsonl"
    with tempfile.TemporaryDirectory() as temporary:
        packed = registry.lineage_file(version, TRAJECTORIES_FILE, Path(temporary))
        if packed is None:
            raise ValueError(
                f"{version.name} carries no {LINEAGE}/{TRAJECTORIES_FILE}: it was registered before versions kept "
                f"their trajectories. Name the evaluate folder of the run that made it instead."
            )
        with gzip.open(packed) as source, atomic_file(file) as target, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return VersionEpisodes(version, file)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
