"""The folder in which a stage keeps its state to resume after a kill: `artifacts/.resume/<stage>/<hash>`.

It is outside the outs, which DVC deletes before a stage. The hash covers the settings, every dep in dvc.yaml, code
included, and the folders of code that dvc.yaml cannot name, so another run's state is never used. It is removed after
success, except for incomplete checkpoints, which may be the last copy of hours of work.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.core.files import content_hash, is_page_of_code, json_hash, read_yaml
from tasks.core.settings import Paths, Settings, read_params
from tasks.core.urls import local_path

GRAPH = Path("dvc.yaml")
REFUSED = "refused"  # in a run's folder: its incomplete checkpoints


def resume_folder(stage: str, settings: Settings, paths: Paths) -> Path:
    """The folder for these settings and deps; it may not exist yet."""
    params = with_artifacts(read_params(), str(paths.artifacts))
    graph = read_yaml(GRAPH)["stages"]
    deps = [*(fill_in(dep, params) for dep in graph[stage]["deps"]), *settings.unwatched_folders()]
    hashes = {dep: content_hash(local_path(dep), ignore=is_page_of_code) for dep in deps}
    key = {"settings": settings.resume_key(), "deps": hashes}
    return resume_root(stage, paths) / json_hash(key)[:16]


def resume_root(stage: str, paths: Paths) -> Path:
    return paths.artifacts / ".resume" / stage


def clear_resume(stage: str, paths: Paths) -> None:
    """Remove what is no longer needed. Never raises: the result counts."""
    for run in resume_root(stage, paths).glob("*"):
        for item in run.glob("*"):
            if item.is_dir() and item.name != REFUSED:
                shutil.rmtree(item, ignore_errors=True)
            elif not item.is_dir():
                with suppress(OSError):
                    item.unlink()
        with suppress(OSError):  # it contains refused checkpoints
            run.rmdir()
    with suppress(OSError):
        resume_root(stage, paths).rmdir()


def with_artifacts(params: dict[str, Any], folder: str) -> dict[str, Any]:
    """The params with results in another folder."""
    return {**params, "paths": {**params.get("paths", {}), "artifacts": folder}}


def fill_in(text: str, params: dict[str, Any]) -> str:
    """Replace `${section.key}` in a string of dvc.yaml."""

    def value(match: re.Match[str]) -> str:
        found: Any = params
        for name in match[1].split("."):
            found = found[name]
        return str(found)

    return re.sub(r"\$\{([\w.]+)\}", value, text)
