"""Copies of the databases as of the moment of their journals.

A promotion journal alternates between two files, and MLflow's database names the one in use with its hash. Two entries
after the database was copied that file is another, so it is copied at once, and both again where its hash differs.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from tasks.commands.archive_file import FILES, MLFLOW
from tasks.core.files import file_hash
from tasks.tracking.aliases import ADOPT
from tasks.tracking.stored_journals import stored_journals, unreadable_journals

NUM_TRIES = 5  # of a database with its journals; each takes well under a second


def copy_of_one_moment(
    databases: Mapping[str, Path], location: Path | None, folder: Path
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Copies of the databases and of the files of the journals that MLflow's names, by their names in the archive.
    `location` is where the journals are, None for a store such as S3.
    """
    for number in range(NUM_TRIES):
        here = folder / str(number)
        here.mkdir()
        copies = {name: _copy_database(path, here / name) for name, path in databases.items() if path.exists()}
        journals = _copy_journals(copies[MLFLOW], location, here)
        hashes = {name: file_hash(path) for name, path in journals.items()}
        unreadable = journals_not_in(copies[MLFLOW], {"location": str(location or ""), "sha256": hashes})
        if not unreadable:
            return copies, journals
    raise journal_is_another(databases[MLFLOW], unreadable[0])


def _copy_journals(database: Path, location: Path | None, folder: Path) -> dict[str, Path]:
    copies: dict[str, Path] = {}
    paths = {file.path for journal in stored_journals(database) for file in journal.files}
    for number, path in enumerate(sorted(path for path in paths if location and path.is_relative_to(location))):
        with suppress(FileNotFoundError):
            copies[name_in_archive(path, location)] = Path(shutil.copy(path, folder / f"{number}.jsonl"))
    return copies


def _copy_database(source: Path, target: Path) -> Path:
    with closing(sqlite3.connect(source, timeout=60)) as left, closing(sqlite3.connect(target)) as right:
        left.backup(right)
    return target


def journals_not_in(database: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The models whose journal, as the database names it, is not among the archive's files."""
    location = Path(manifest["location"])
    if not manifest["location"]:
        return []  # the files are in a store such as S3
    here = [
        journal
        for journal in stored_journals(database)
        if all(file.path.is_relative_to(location) for file in journal.files)
    ]
    return unreadable_journals(here, lambda path: manifest["sha256"].get(name_in_archive(path, location)))


def journal_is_another(database: Path, model: str) -> ValueError:
    return ValueError(
        f"{database}: the journal of {model} is gone or not the one that is named here, so a backup could not say who "
        f"is champion, and none was written. Restore an older backup, or begin a new journal: {ADOPT}."
    )


def name_in_archive(path: Path, location: Path | None) -> str:
    """Of a file under tracking.artifact_location, its name in the archive."""
    return f"{FILES}/{path.relative_to(location or '').as_posix()}"
