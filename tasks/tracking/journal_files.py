"""The two files of a journal (`journal.py`) in MLflow's store: verified by hashes of a pointer, synced to the disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tasks.tracking.connection import local_folder
from tasks.tracking.faults import find_fault

FILES = ("journal-0.jsonl", "journal-1.jsonl")


class Pointer(NamedTuple):
    """The file in use, of the run `run`. `sha256_before` is of the other file, as it was before the last write: None
    where there was none, or where an earlier turnwise wrote the pointer.
    """

    run: str
    file: str
    sha256: str
    entries: int
    sha256_before: str | None = None


def parse_pointer(text: str | None) -> Pointer | None:
    try:
        pointer = Pointer(**json.loads(text or "null"))
    except (TypeError, ValueError):
        return None
    is_whole = isinstance(pointer.entries, int) and pointer.file in FILES and isinstance(pointer.run, str)
    return pointer if is_whole else None


def read_verified(pointer: Pointer) -> bytes | None:
    """The file in use; None where it is gone or altered."""
    content = _read(pointer.run, pointer.file)
    return content if content is not None and hash_of(content) == pointer.sha256 else None


def read_still_verified(pointer: Pointer) -> bytes:
    """The most lines in either file that one of the pointer's hashes verifies; empty where there are none.

    A file written later begins with the pointer's entries, as where MLflow's database is an older copy. The file before
    is whole where the newest one was cut short.
    """
    contents = [content for name in FILES if (content := _read(pointer.run, name)) is not None]
    beginnings = [b"".join(content.splitlines(keepends=True)[: pointer.entries]) for content in contents]
    found = [content for content in beginnings if hash_of(content) == pointer.sha256]
    found += [content for content in contents if hash_of(content) == pointer.sha256_before]
    return next(iter(found), b"")


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sync_file(location: str, file: str) -> None:
    """Write a file of a run's folder through to the disk. SQLite does so with a tag that names it, and after a power
    cut there must not be the tag alone. A store that is no folder of this machine takes care of its own files.
    """
    folder = local_folder(location)
    for path in (folder / file, folder) if folder else ():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(run: str, file: str) -> bytes | None:
    """None where there is no such file. A store that fails for the moment is an error: its journal is not lost."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    with TemporaryDirectory() as folder:
        try:
            return Path(download_artifacts(run_id=run, artifact_path=file, dst_path=folder)).read_bytes()
        except MlflowException as error:
            if find_fault(error).may_pass:
                raise
            return None
        except OSError:
            return None
