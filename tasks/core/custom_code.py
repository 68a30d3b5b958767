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

from tasks.core.files import files_of, is_page_of_code
from tasks.core.import_graph import closure, module_file
from tasks.core.settings import PARAMS_FILE, read_params

CUSTOM = Path("tasks/custom")
OF_DVC = ("paths.custom", "curate.source", "model.path")  # dvc.yaml names them, so they may be anywhere
HASHED_ELSEWHERE = ("curate.source", "environment.cache.frozen")
MODULE = re.compile(r"(tasks\.custom(?:\.\w+)+)(?::\w+)?", re.ASCII)


def custom_folder() -> Path:
    """That of params.yaml."""
    return Path(read_params()["paths"]["custom"])


def custom_data() -> set[Path]:
    """The files beside the code in that folder, which the code may read. Not those of `HASHED_ELSEWHERE`: of problems
    and frozen replies, what is read counts.
    """
    folder = custom_folder()
    named = {Path(value) for key, value in _texts(read_params()) if key in HASHED_ELSEWHERE}
    files = set(files_of(folder)) if folder.is_dir() else set[Path]()
    return {file for file in files - named if file.suffix != ".py" and not is_page_of_code(file)}


def unwatched(params: Mapping[str, Any], *, source: Path = PARAMS_FILE) -> list[str]:
    """A line for each value that names, and each module of it that imports, something of tasks/custom that no stage
    watches.
    """
    folder = Path(params["paths"]["custom"])
    if link := _link_to_a_folder(folder):
        return [
            f"{source}: {link} is a link to a folder, behind which no stage would see a change. Copy the folder there."
        ]
    if folder == CUSTOM:
        return []
    if not folder.is_dir():
        return [f"{source}: paths.custom is {folder}, and there is no such folder. Make it, or write {CUSTOM}."]
    found = [
        f"{source}: {key} = {value!r} is in {CUSTOM} and not in paths.custom, {folder}, so no stage would see it "
        f"change. Move it there, or correct one of the two."
        for key, value in _texts(params)
        if key not in OF_DVC and (place := _place(value)) is not None and not place.is_relative_to(folder)
    ]
    return found or [
        f"{source}: what it names in {folder} imports {file.as_posix()}, which is not in paths.custom, so no stage "
        f"would see it change. Move it there, or set paths.custom: {CUSTOM}."
        for file in _imported(params)
        if file.is_relative_to(CUSTOM) and not file.is_relative_to(folder)
    ]


def _link_to_a_folder(folder: Path) -> Path | None:
    """Neither DVC nor we follow one within a folder that is watched, though Python imports through it."""
    within = (Path(place, name) for place, names, _ in os.walk(folder) for name in names)
    return next((item for item in within if item.is_symlink()), None)


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
    """Each text of params with its key."""
    if isinstance(value, str):
        yield key, value
        return
    named = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in named:
        yield from _texts(item, f"{key}.{name}" if key else str(name))
