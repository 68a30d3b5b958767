"""A folder for a server to keep its files in: one for each process, its owner's alone (0700), gone when that ends.

Where `environment.mcp` writes {scratch}, in the command or in a literal of the server's environment, the server finds
the path of its folder. Episodes never see that path: it is another one each time, so replies name it as {scratch}, and
a call that names {scratch} reaches the server with the path.

All folders of a process are inside one root in the system's temporary folder, which goes when the environment is
closed. After a kill nobody is left to do that: whoever makes the next root removes those whose process is gone, which
a lock on the root tells. Left out: a limit of what a server may write.
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
MIN_AGE_SECONDS = 60  # of a root that nobody has locked: a younger one may be about to be


class ScratchRoot:
    """Makes the folders of one environment's servers, and removes what is left of them at the end."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1

    def make(self) -> Path:
        """A new, empty folder. OSError where the system's temporary folder cannot be written to."""
        if self._root is None:
            parent = Path(tempfile.gettempdir())
            remove_abandoned(parent)
            self._root = Path(os.path.realpath(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))  # as servers resolve it
            self._lock = os.open(self._root, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return Path(tempfile.mkdtemp(dir=self._root))

    def close(self) -> None:
        """Remove every folder that was made."""
        root, self._root = self._root, None
        if root is not None:
            remove(root)
            os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the roots of ours in a folder whose process is gone."""
    for root in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, still in use, or removed at the same time
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
    """Remove a folder with all that is in it; what withstands that is left for another day."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a folder in it was made read-only
        folder.chmod(OWNERS_ALONE)
        for place, names, _ in os.walk(folder):
            for inner in (Path(place, name) for name in names):
                if not inner.is_symlink():
                    inner.chmod(OWNERS_ALONE)
        shutil.rmtree(folder, ignore_errors=True)


def empty(folder: Path) -> None:
    """Remove all that is in a folder, and leave the folder. OSError where something stays."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove(entry)
        else:
            entry.unlink()
    if any(folder.iterdir()):
        raise OSError(f"{folder} could not be emptied")


def with_path(arguments: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    """The arguments of a call with the folder's path for {scratch}; those that JSON cannot hold stay as they are."""
    with suppress(ValueError, TypeError, RecursionError):
        text = json.dumps(arguments)
        if folder and SCRATCH in text:
            return dict(json.loads(text.replace(SCRATCH, json.dumps(folder)[1:-1])))
    return arguments


def without_path(text: str, folder: str) -> str:
    """What a server said, with {scratch} for the folder's path."""
    return text.replace(folder, SCRATCH) if folder else text
