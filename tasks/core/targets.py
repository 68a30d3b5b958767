"""What an atomic write replaces, a folder that a killed write had moved away, what else it left, and who may write."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = Path(".cache/locks")  # of the workspace


def behind_links(path: Path) -> Path:
    """What `path` leads to. A link to a file that nobody may write is replaced itself: caches (DVC's) give such links,
    and what is behind them is not ours.
    """
    target = Path(os.path.realpath(path))
    is_cached = path.is_symlink() and target.is_file() and not target.stat().st_mode & 0o222
    return path if is_cached else target


def put_back(path: Path) -> None:
    """Where nothing is at `path`, move the folder back that a call of `atomic_folder` moved away before it ended."""
    for hidden in path.parent.glob(f".{glob.escape(path.name)}.*.replaced"):
        if not path.exists():
            os.replace(hidden, path)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left unfinished in `folder`, and put back what they had only moved away. For a caller who
    is the only one to write there.
    """
    for hidden in folder.glob(".*.*.replaced"):
        put_back(folder / hidden.name[1:].rsplit(".", 2)[0])
    for leftover in (*folder.glob(".*.partial"), *folder.glob(".*.replaced")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Wait for whoever rewrites `file` from this workspace, then be the only one. The lock is a file of its own that
    stays: a file that is replaced keeps no lock, one beside it would change what DVC and git see, and NFS locks no
    folder.
    """
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / name).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
