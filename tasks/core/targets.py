"""What an atomic write replaces, a folder that a killed write had moved away, and what else it left."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path


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
