"""The folder of the user's own code and data that the stages of these params watch: `paths.custom`.

It is tasks/custom, or a folder in it, so that several agents share one installation and an edit for one of them runs no
stage of another. What params name in tasks/custom must then be in that folder, and import nothing beside it: DVC,
resume keys and measurement keys would not see it change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.import_graph import closure, module_file
from tasks.core.settings import PARAMS_FILE, read_params

CUSTOM = Path("tasks/custom")
OF_DVC = ("paths.custom", "curate.source", "model.path")  # dvc.yaml names them, so they may be anywhere
MODULE = re.compile(r"(tasks\.custom(?:\.\w+)+)(?::\w+)?", re.ASCII)


def custom_folder() -> Path:
    """That of params.yaml."""
    return Path(read_params()["paths"]["custom"])


def unwatched(params: Mapping[str, Any], *, source: Path = PARAMS_FILE) -> list[str]:
    """A line for each value that names, and each module of it that imports, something of tasks/custom that no stage
    watches.
    """
    folder = Path(params["paths"]["custom"])
    if folder == CUSTOM:
        return []
    if not folder.is_dir():
        return [f"{source}: paths.custom is {folder}, and there is no such folder. Make it, or write {CUSTOM}."]
    found = [
        f"{source}: {key} = {value!r} is in {CUSTOM} and not in paths.custom, {folder}, so no stage would see it "
        f"change. Move it there, or correct one of the two."
        for key, value in _texts(params)
        if (place := _place(value)) is not None and not place.is_relative_to(folder)
    ]
    return found or [
        f"{source}: what it names in {folder} imports {file.as_posix()}, which is not in paths.custom, so no stage "
        f"would see it change. Move it there, or set paths.custom: {CUSTOM}."
        for file in _imported(params)
        if file.is_relative_to(CUSTOM) and not file.is_relative_to(folder)
    ]


def _imported(params: Mapping[str, Any]) -> list[Path]:
    modules = (found[1] for _, value in _texts(params) if (found := MODULE.fullmatch(value)))
    files = [file for file in map(module_file, modules) if file is not None]
    return sorted(closure(files, without=lambda file: not file.is_relative_to(CUSTOM)))


def _place(value: str) -> Path | None:
    """What a value of params names in tasks/custom, a module as its path without a suffix."""
    if named := MODULE.fullmatch(value):
        return Path(*named[1].split("."))
    place = Path(os.path.normpath(value))
    return place if place != CUSTOM and CUSTOM in place.parents else None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if key not in OF_DVC:
            yield key, value
        return
    named = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in named:
        yield from _texts(item, f"{key}.{name}" if key else str(name))
