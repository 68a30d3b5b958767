"""What `kill -9` and a bad disk leave of DVC, removed before DVC is asked. This module does not import Prefect."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from tasks.core.databases import fault_of_database
from tasks.core.files import read_yaml
from tasks.core.provenance import LOCK_FILE
from tasks.core.terminal import warn
from tasks.core.workspace import SITE_CACHE

DVC_FOLDER = Path(".dvc")


def release_dead_locks() -> None:
    """Remove what `kill -9` and a bad disk leave of DVC: locks of dead processes, and files that it cannot read.

    DVC itself removes a dead process's lock, but not where another process has its number by now. The caller has the
    flow's lock, and a DVC started by hand has the lock of the file.
    """
    _release_dead_readers_and_writers(DVC_FOLDER / "tmp")
    _set_aside_a_damaged_lock()
    _remove_damaged_notes()


def _set_aside_a_damaged_lock() -> None:
    """DVC refuses a damaged dvc.lock; without one it finds each stage in its run cache and writes the file again."""
    try:
        if LOCK_FILE.exists():
            read_yaml(LOCK_FILE)
    except ValueError as error:
        aside = DVC_FOLDER / "tmp" / "dvc.lock.damaged"
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(LOCK_FILE, aside)
        warn(f"warning: {error} This run continues without it: it was moved to {aside}, and DVC writes a new one.")


def _remove_damaged_notes() -> None:
    """DVC also stops where its databases of file hashes and links are damaged; it creates missing ones again."""
    for database in sorted(SITE_CACHE.rglob("cache.db")):
        fault = fault_of_database(database)
        if fault is not None:
            shutil.rmtree(database.parent)
            warn(
                f"warning: {database}: DVC's database of file hashes was damaged ({fault}), so it was removed; "
                f"DVC makes it again."
            )


def _release_dead_readers_and_writers(folder: Path) -> None:
    file = folder / "rwlock"
    if not file.exists():
        return
    with (folder / "rwlock.lock").open("a") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # a living DVC has it
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            readers = [reader for readers in held.get("read", {}).values() for reader in readers]
            holders = [*held.get("write", {}).values(), *readers]
            is_dead = not any(_is_dvc(int(holder["pid"])) for holder in holders)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_dead = True
        if is_dead:
            file.unlink()


def _is_dvc(pid: int) -> bool:
    import psutil

    try:
        return any("dvc" in Path(part).name for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
