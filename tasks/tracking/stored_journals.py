"""The journals that a copy of MLflow's database names: for a backup, which has a database and no MLflow on it.

Which of a journal's files counts is what `journal.read_journal` says: the first of these that has its hash.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tasks.tracking.journal import OWNER, POINTER
from tasks.tracking.journal_files import Pointer, hash_of, parse_pointer
from tasks.tracking.relocate import FILE

OF_MODELS = "SELECT name, value FROM registered_model_tags WHERE key = ?"
OF_RUNS = """
SELECT owner.value, pointer.value, runs.run_uuid FROM runs
JOIN tags AS owner ON owner.run_uuid = runs.run_uuid AND owner.key = ?
JOIN tags AS pointer ON pointer.run_uuid = runs.run_uuid AND pointer.key = ?
ORDER BY runs.start_time
"""
FOLDERS = "SELECT run_uuid, artifact_uri FROM runs"


class JournalFile(NamedTuple):
    """`path` is absolute, as the database has it; in a store such as S3 it is under no folder."""

    path: Path
    pointer: Pointer


class StoredJournal(NamedTuple):
    """The journal of a registered model, and the files that its tags name, the longer one first."""

    model: str
    files: Sequence[JournalFile]


def stored_journals(database: Path) -> list[StoredJournal]:
    """Of every registered model that has one, also of those that were deleted."""
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        of_models = dict(connection.execute(OF_MODELS, (POINTER,)))
        of_runs = {run: (owner, tag) for owner, tag, run in connection.execute(OF_RUNS, (OWNER, POINTER))}
        folders = {run: Path(str(folder).removeprefix(FILE)) for run, folder in connection.execute(FOLDERS)}
    newest = {owner: run for run, (owner, _) in of_runs.items()}
    found = []
    for model in sorted({*of_models, *newest}):
        of_model = parse_pointer(of_models.get(model))
        run = of_model.run if of_model and of_model.run in folders else newest.get(model)
        _, tag = of_runs.get(run, (None, None))
        pointers = {pointer for pointer in (of_model, parse_pointer(tag)) if pointer and pointer.run in folders}
        longest_first = sorted(pointers, key=lambda pointer: pointer.entries, reverse=True)
        files = [JournalFile(folders[pointer.run] / pointer.file, pointer) for pointer in longest_first]
        found.append(StoredJournal(model, files))
    return found


def unreadable_journals(journals: Sequence[StoredJournal], find_hash: Callable[[Path], str | None]) -> list[str]:
    """The models whose journal has none of its files with the hash on record; `find_hash` is None where there is no
    such file.
    """
    return [
        journal.model
        for journal in journals
        if not any(find_hash(file.path) == file.pointer.sha256 for file in journal.files)
    ]


def entries_of(journals: Sequence[StoredJournal], find: Callable[[Path], Path | None]) -> set[tuple[str, ...]]:
    """What tells entries apart: their ids, and their numbers where `find` has no file here. A journal that cannot be
    read has none.
    """
    found: set[tuple[str, ...]] = set()
    for file in (file for journal in journals for file in journal.files):
        path = find(file.path)
        if path is None:
            found |= {("entry", file.pointer.run, str(number)) for number in range(file.pointer.entries)}
        elif path.is_file():
            content = path.read_bytes()
            if hash_of(content) == file.pointer.sha256:
                found |= {("entry", json.loads(line)["id"]) for line in content.decode().split("\n") if line}
    return found
