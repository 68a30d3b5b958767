"""The command `fetch`: a registered version as a folder that transformers and vLLM load, its weights verified; or what
an `s3://` URL names, such as a folder of `paths.remote`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tasks.core.files import files_of
from tasks.core.text import counted
from tasks.core.urls import is_url
from tasks.core.workspace import as_shell_sees
from tasks.storage.inputs import copy_argument
from tasks.tracking.model_uri import find_version, refuse_edited_version


def fetch(uri: str, folder: Path, address: str | None = None) -> str:
    _refuse_what_is_there(folder)
    if is_url(uri):
        return _fetch_from_s3(uri, folder)
    registry, version = find_version(uri, address)
    refuse_edited_version(registry, version)
    registry.fetch(version, folder)
    known = f"weights {version.weights[:12]} as registered"
    unknown = "it has no hash of its weights, so they cannot be verified"
    return f"{uri} is version {version.version}, {known if version.weights else unknown}: {as_shell_sees(folder)}"


def _fetch_from_s3(url: str, folder: Path) -> str:
    """A folder or a file of `paths.remote`, or any other on S3."""
    copy = copy_argument(url)
    if copy.is_dir():
        shutil.copytree(copy, folder, dirs_exist_ok=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy, folder)
    return f"{url}: {counted(len(files_of(folder)), 'file')}: {as_shell_sees(folder)}"


def _refuse_what_is_there(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder}: is not an empty folder, and fetch overwrites nothing. Name another folder.")
