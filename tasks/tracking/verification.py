"""Downloaded files of a version compared with the hashes it was registered under.

Every file is under one: those of the model under `folder_hash`, those that tell where it came from under the tags that
name them. So what is altered, added or gone, in whichever subfolder, is refused before anybody loads it. A version from
before `folder_hash` is held to what it has: its weights, and what lies beside them at the top.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tasks.core.files import content_hash, read_json
from tasks.models.files import NOT_OF_THE_MODEL, files_hash
from tasks.tracking.uploads import FOLDER_TAG
from tasks.tracking.versions import EARLIER_FILE, LINEAGE, Version


def refuse_altered_model(version: Version, folder: Path, *, store: str) -> None:
    """ValueError where the model in `folder` is not the registered one, file by file."""
    hashes: dict[str, tuple[str, Callable[[], str]]] = {"weights_hash": ("weights", lambda: _weights_hash(folder))}
    if FOLDER_TAG in version.tags:
        what = "files (its configuration, tokenizer or another was altered, added or lost)"
        hashes[FOLDER_TAG] = (what, lambda: files_hash(folder))
    else:
        hashes["files_hash"] = ("configuration and tokenizer", lambda: _hash_before(folder))
    for tag, (what, found) in hashes.items():
        if tag in version.tags and version.tags[tag] != found():
            raise ValueError(
                f"{version.name}: its stored {what} are not those that were registered, so it is not the model that "
                f"was measured. Restore {store} from a backup, or `python -m tasks rollback`."
            )


def remove_what_is_under_no_hash(folder: Path) -> None:
    """Of a downloaded folder: what lies beside the model and its lineage."""
    for name in NOT_OF_THE_MODEL:
        if name != LINEAGE:
            shutil.rmtree(folder / name, ignore_errors=True)


def refuse_altered_lineage(version: Version, folder: Path, *, store: str) -> None:
    """ValueError where the lineage in `folder` is not that of `version`, each earlier time included. What no tag names
    is removed from it: a killed call may have left some.
    """
    known: set[Path] = set()
    while True:
        for path, expected in version.lineage_files.items():
            if not (folder / path).is_file() or content_hash(folder / path) != expected:
                raise altered(version, path, store=store)
            known.add(folder / path)
        earlier = f"{version.lineage_folder}/{EARLIER_FILE}"
        if earlier not in version.lineage_files:
            break
        version = replace(version, tags=read_json(folder / earlier))
    for file in [file for file in (folder / LINEAGE).rglob("*") if file.is_file() and file not in known]:
        file.unlink()


def altered(version: Version, path: str, *, store: str) -> ValueError:
    return ValueError(
        f"{version.name}: its {path} is gone or not the one that was registered, so it proves nothing. "
        f"Restore {store} from a backup."
    )


def _weights_hash(folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    return content_hash(*weights) if weights else "none"


def _hash_before(folder: Path) -> str:
    return content_hash(folder, ignore=lambda file: file.suffix == ".safetensors" or file.parent != folder)
