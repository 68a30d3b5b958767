"""`python -m tasks backup FILE` and `restore FILE`: MLflow's and Prefect's databases and MLflow's files in one tar.

A database is copied by SQLite's own backup, which is consistent while others write, and before the files: what it names
is there by then. Of a promotion journal, whose files are written in turn, the file that the copied database names is
copied with it. Every file's SHA-256 is in the manifest. The archive is read again before it gets its name, and each
file is compared before anything is restored. What a restore replaces is moved aside, never removed.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.commands.archive_copies import copy_of_one_moment, journal_is_another, journals_not_in, name_in_archive
from tasks.commands.archive_file import (
    FILES,
    FORMAT,
    MLFLOW,
    PREFECT,
    add_file,
    add_manifest,
    extract,
    is_backup,
    read_all,
)
from tasks.commands.outputs import refuse_to_replace
from tasks.core.aside import name_aside
from tasks.core.databases import fault_of_database
from tasks.core.files import atomic_file
from tasks.core.settings import load, load_paths, read_params
from tasks.core.text import counted
from tasks.core.workspace import as_shell_sees
from tasks.pipeline.run_lock import only_run
from tasks.tracking.aliases import ADOPT
from tasks.tracking.connection import TABLES
from tasks.tracking.half_restored import refuse_half_restored, unfinished
from tasks.tracking.relocate import FILE, database_of, replace_location
from tasks.tracking.settings import TrackingSections, TrackingSettings
from tasks.tracking.stored_journals import entries_of, stored_journals

JOURNALS = ("", "-wal", "-shm", "-journal")  # of a SQLite database
BACKUP, RESTORE = ".backup-", ".restore-"  # begin the names of folders, which end with the number of their process


@dataclass(frozen=True, slots=True)
class Places:
    """What is archived, and where it is in this workspace. `files` is None where they are in a store such as S3."""

    tracking: TrackingSettings
    artifacts: Path
    mlflow: Path
    prefect: Path
    files: Path | None


def find_places() -> Places:
    params = read_params()
    tracking, artifacts = load(TrackingSections, params).tracking, load_paths(params).artifacts
    files = tracking.files and tracking.files.absolute()
    return Places(tracking, artifacts, database_of(tracking), artifacts.absolute() / ".prefect" / "prefect.db", files)


def backup(file: Path) -> Iterator[str]:
    """Write the archive, also while a run writes; ValueError where there is no sound registry, or `file` is another."""
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder, so no backup can be written there. Name a file, such as {file / 'b.tar'}."
        )
    refuse_to_replace(file, kind="a backup", is_own=is_backup, remedy="Name a new file.")
    places = find_places()
    if places.files is not None and file.resolve().is_relative_to(places.files.resolve()):
        raise ValueError(
            f"{file} is under {places.files}, and a backup of that folder would contain itself. Name a file elsewhere, "
            f"best on another disk."
        )
    _refuse_no_registry(places.mlflow)
    with _own_folder(places.mlflow.parent, BACKUP) as folder:
        databases = {MLFLOW: places.mlflow, PREFECT: places.prefect}
        weights = _find_weights(places.files)
        copies, journals = copy_of_one_moment(databases, places.files, Path(folder))
        with atomic_file(file.absolute()) as partial:
            with tarfile.open(partial, "w") as archive:
                hashes = {name: add_file(archive, name, path) for name, path in copies.items()}
                hashes |= _add_files(archive, places.files, journals)
                _refuse_pruned(weights - hashes.keys())
                manifest = {"format": FORMAT, "sha256": hashes, "location": str(places.files or "")}
                add_manifest(archive, manifest)
            with tarfile.open(partial) as archive:
                unreadable = journals_not_in(copies[MLFLOW], read_all(archive, file))
            if unreadable:
                raise journal_is_another(places.mlflow, unreadable[0])
            size = partial.stat().st_size
        elsewhere = _find_files_elsewhere(copies[MLFLOW], places.files)
    what = f"{counted(len(hashes), 'file')}, {size / 1e6:.1f} MB"
    yield f"{as_shell_sees(file)}: {what}, each read again and found equal to its hash"
    for name, location in elsewhere:
        yield f"not in it: the files of MLflow's experiment {name!r}, under {location}; back these up too"


def restore(file: Path, *, force: bool) -> Iterator[str]:
    """Replace the registry by the archive's; ValueError where the present one has what the archive lacks."""
    places = find_places()
    if not file.is_file():
        fault = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(f"{file} {fault}, so there is nothing to restore. Name a file that `backup` wrote.")
    places.mlflow.parent.mkdir(parents=True, exist_ok=True)
    with only_run(places.artifacts), _own_folder(places.mlflow.parent, RESTORE) as folder:
        staged = Path(folder)
        manifest = extract(file, staged)
        _refuse_open(places.mlflow, places.prefect)
        unreadable = journals_not_in(staged / MLFLOW, manifest)
        if not force:
            _refuse_other_journals(unreadable, file)
            _refuse_loss(places.mlflow, staged, manifest, file)
        if manifest["location"] and places.files is not None:
            replace_location(staged / MLFLOW, manifest["location"], str(places.files))
        again = f"python -m tasks restore {shlex.quote(str(file.absolute()))}{' --force' if force else ''}"
        with unfinished(places.mlflow, again):
            aside = _move_aside(places)
            _move_in(staged, places)
    yield f"{as_shell_sees(places.mlflow)} is as it was when {file} was written"
    if aside is not None:
        yield f"what was there before is in {as_shell_sees(aside)}"
    for model in unreadable:
        yield f"the journal of {model} cannot be read: begin a new one, {ADOPT}"


@contextmanager
def _own_folder(parent: Path, prefix: str) -> Iterator[str]:
    """A folder for as long as the block lasts. Those of processes that were killed are removed."""
    for left in (*parent.glob(f"{BACKUP}*"), *parent.glob(f"{RESTORE}*")):
        number = left.name.rpartition("-")[2]
        if not (number.isdigit() and psutil.pid_exists(int(number))):
            shutil.rmtree(left, ignore_errors=True)
    folder = parent / f"{prefix}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_no_registry(database: Path) -> None:
    refuse_half_restored(database)
    fault = fault_of_database(database, TABLES) if database.exists() else "it does not exist"
    if fault is not None:
        raise ValueError(f"{database}: there is no registry to back up ({fault}). Run the flow, or restore a backup.")


def _find_files_elsewhere(database: Path, folder: Path | None) -> list[tuple[str, str]]:
    """(experiment, where its files are) for those with runs whose files are not in `folder`: other agents', or S3."""
    query = "SELECT name, artifact_location FROM experiments WHERE experiment_id IN (SELECT experiment_id FROM runs)"
    with closing(sqlite3.connect(database)) as connection:
        found = sorted((str(name), str(location)) for name, location in connection.execute(query))
    return [
        (name, location)
        for name, location in found
        if folder is None or not Path(location.removeprefix(FILE)).is_relative_to(folder)
    ]


def _find_weights(folder: Path | None) -> set[str]:
    return {name_in_archive(path, folder) for path in folder.rglob("*.safetensors")} if folder else set()


def _refuse_pruned(gone: set[str]) -> None:
    if gone:
        raise ValueError(
            f"{min(gone)}: these weights went while the backup was written, by `prune` perhaps, and the copy of "
            f"the database may name them as a champion's. Nothing was written; run `python -m tasks backup` again."
        )


def _add_files(archive: tarfile.TarFile, folder: Path | None, copies: Mapping[str, Path]) -> dict[str, str]:
    """Add a folder's files, in place of some of them their `copies` (by name); returns the hash of each by name. Files
    that a run removes meanwhile, such as half-written ones, are left out.
    """
    hashes: dict[str, str] = {}
    if folder is None:
        return hashes
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = name_in_archive(path, folder)
            with suppress(FileNotFoundError):
                hashes[name] = add_file(archive, name, copies.get(name, path))
    return hashes


def _refuse_open(*databases: Path) -> None:
    """A server would go on writing into the file that was moved aside."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error):
            held = {opened.path for opened in process.open_files()} & {str(path.resolve()) for path in databases}
            if held:
                raise ValueError(
                    f"{held.pop()} is open in process {process.pid} ({process.name()}), which would write into what is "
                    f"replaced. End it (`python -m flows serve`, `mlflow ui`), then restore again."
                )


def _refuse_other_journals(models: list[str], file: Path) -> None:
    if models:
        raise ValueError(
            f"{file}: the journal of {models[0]} in it is not the one that its database names, so after a restore "
            f"nobody could say who is champion, and no promotion or rollback would run. Nothing was changed. Restore "
            f"another backup; if there is none, this one with `--force`, and begin a new journal: {ADOPT}."
        )


def _refuse_loss(present: Path, staged: Path, manifest: Mapping[str, Any], file: Path) -> None:
    """Refuse where the present registry has runs, versions or decisions that the archive lacks, or others than it had.
    A person's "no" is an entry of a journal and nothing else.
    """
    if not present.exists() or fault_of_database(present, TABLES) is not None:
        return
    here = _contents(present) | entries_of(stored_journals(present), _find_here)
    find_staged = functools.partial(_find_staged, staged, manifest["location"])
    there = _contents(staged / MLFLOW) | entries_of(stored_journals(staged / MLFLOW), find_staged)
    lost = here - there
    if lost:
        which = "a newer state of the same registry" if here & there else "another registry"
        raise ValueError(
            f"{present} is {which}: {len(lost)} of the runs, versions, aliases and entries of journals in it are not "
            f"in {file}. Nothing was changed. To replace it all the same, `--force`; it is moved aside then."
        )


def _find_here(path: Path) -> Path | None:
    return path if path.is_absolute() else None  # in a store such as S3


def _find_staged(staged: Path, location: str, path: Path) -> Path | None:
    if location and path.is_relative_to(location):
        return staged / name_in_archive(path, Path(location))
    return _find_here(path)  # not in the archive, so as it is


def _contents(database: Path) -> set[tuple[str, ...]]:
    queries = (
        "SELECT 'run', run_uuid, status FROM runs",
        "SELECT 'version', name, version FROM model_versions",
        "SELECT 'alias', name || '@' || alias, version FROM registered_model_aliases",
    )
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        return {tuple(map(str, row)) for query in queries for row in connection.execute(query)}


def _move_aside(places: Places) -> Path | None:
    """To a folder beside the database; None where nothing was there."""
    parent = places.mlflow.parent
    files = [Path(f"{database}{suffix}") for database in (places.mlflow, places.prefect) for suffix in JOURNALS]
    present = [path for path in (*files, *([places.files] if places.files else [])) if path.exists()]
    if not present:
        return None
    aside = name_aside(parent, "replaced")
    aside.mkdir()
    for path in present:
        shutil.move(path, aside / path.name)
    return aside


def _move_in(staged: Path, places: Places) -> None:
    if places.files is not None and (staged / FILES).exists():
        places.files.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staged / FILES, places.files)
    if (staged / PREFECT).exists():
        places.prefect.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(staged / PREFECT, places.prefect)
    os.replace(staged / MLFLOW, places.mlflow)
