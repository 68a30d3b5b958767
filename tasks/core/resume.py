"""Where a stage keeps what it needs to go on after a kill: a folder named by everything its result depends on.

`artifacts/.resume/<stage>/<hash>` is outside the stage's outs, which DVC deletes before it runs a stage. The hash is
of the settings and of every dep dvc.yaml names, code included, so state of another run is never taken up. It is removed
once the stage has its result, but for checkpoints that were not whole: those may be the last copy of hours of work.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.core.files import content_hash, json_hash, read_yaml
from tasks.core.settings import Paths, Settings, read_params

GRAPH = Path("dvc.yaml")
REFUSED = "refused"  # in a run's folder: its checkpoints that were not whole


def resume_folder(stage: str, settings: Settings, paths: Paths) -> Path:
    """The folder for this stage with these settings and deps; it may not exist yet."""
    params = {**read_params(), "paths": {"artifacts": str(paths.artifacts)}}
    graph = read_yaml(GRAPH)["stages"]
    deps = [fill_in(dep, params) for dep in graph[stage]["deps"]]
    key = {"settings": settings.model_dump(mode="json"), "deps": {dep: content_hash(Path(dep)) for dep in deps}}
    return resume_root(stage, paths) / json_hash(key)[:16]


def resume_root(stage: str, paths: Paths) -> Path:
    return paths.artifacts / ".resume" / stage


def clear_resume(stage: str, paths: Paths) -> None:
    """The stage has its result, so nothing of it is left to go on with. No error: the result counts."""
    for run in resume_root(stage, paths).glob("*"):
        for item in run.glob("*"):
            if item.is_dir() and item.name != REFUSED:
                shutil.rmtree(item, ignore_errors=True)
            elif not item.is_dir():
                with suppress(OSError):
                    item.unlink()
        with suppress(OSError):  # it contains what was refused
            run.rmdir()
    with suppress(OSError):
        resume_root(stage, paths).rmdir()


def fill_in(text: str, params: dict[str, Any]) -> str:
    """A string of dvc.yaml with its `${section.key}` replaced from `params`."""

    def value(match: re.Match[str]) -> str:
        found: Any = params
        for name in match[1].split("."):
            found = found[name]
        return str(found)

    return re.sub(r"\$\{([\w.]+)\}", value, text)
