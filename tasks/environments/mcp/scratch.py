"""A folder for each server process, readable by its owner only (0700), removed with the process.

{scratch} in the command or in a literal of the server's environment becomes the folder's path. Episodes never see the
path, which changes each time: replies show {scratch}, and a call with {scratch} reaches the server with the path.

All folders of a process are in one locked root in the system's temporary folder. A killed process leaves its root; the
next process removes roots without a lock. Left out: a limit on what a server writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.environments.mcp.settings import SCRATCH

PREFIX = "turnwise-scratch-"
OWNERS_ALONE = 0o700
MIN_AGE_SECONDS = 60  # of an unlocked root: a younger one may not be locked yet


class ScratchRoot:
    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1

    def make(self) -> Path:
        """A new, empty folder. OSError if the temporary folder is not writable."""
        if self._root is None:
            parent = Path(tempfile.gettempdir())
            remove_abandoned(parent)
            self._root = Path(os.path.realpath(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))  # as servers resolve it
            self._lock = os.open(self._root, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return Path(tempfile.mkdtemp(dir=self._root))

    def close(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            remove(root)
            os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    for root in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or just removed
            status = root.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < MIN_AGE_SECONDS:
                continue
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(root)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder and its content; ignore what cannot be removed."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a folder in it was made read-only
        folder.chmod(OWNERS_ALONE)
        for place, names, _ in os.walk(folder):
            for inner in (Path(place, name) for name in names):
                if not inner.is_symlink():
                    inner.chmod(OWNERS_ALONE)
        shutil.rmtree(folder, ignore_errors=True)


def empty(folder: Path) -> None:
    """Remove the content of a folder. OSError if something remains."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove(entry)
        else:
            entry.unlink()
    if any(folder.iterdir()):
        raise OSError(f"{folder} could not be emptied")


def with_path(arguments: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    with suppress(ValueError, TypeError, RecursionError):
        text = json.dumps(arguments)
        if folder and SCRATCH in text:
            return dict(json.loads(text.replace(SCRATCH, json.dumps(folder)[1:-1])))
    return arguments


def without_path(text: str, folder: str) -> str:
    return text.replace(folder, SCRATCH) if folder else text
