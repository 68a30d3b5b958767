"""The embedded registry after its folder was moved or copied: MLflow's database has absolute paths of its files.

Every such path begins with the experiment's folder, so one transaction gives all of them the new beginning. A server's
files are found through the server, and are not touched.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from tasks.core.settings import PARAMS_FILE
from tasks.core.text import counted
from tasks.tracking.settings import TrackingSettings

# Columns of MLflow's tables that have the path of a file or folder (3.17; tests/tracking looks for others).
LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),
)
FILE = "file://"


def database_of(settings: TrackingSettings) -> Path:
    """The sqlite file of the embedded registry. ValueError for a server or another database."""
    if settings.database is None:
        raise ValueError(
            f"tracking.uri = {settings.uri!r} is no SQLite file, and only the registry in one is handled here. Use "
            f"that server's own tools, such as pg_dump and a copy of its artifacts."
        )
    return settings.database.absolute()


def way_to_moved_files(settings: TrackingSettings, old: str) -> str:
    """What to do where files that MLflow names under `old` are elsewhere by now; only SQLite's paths change here."""
    if settings.database is not None:
        return "run `python -m tasks registry relocate`"
    setting = "" if settings.files is None else f" and set tracking.artifact_location to {old}"
    return f"link {old} to where they are now (ln -s){setting}"


def relocate(settings: TrackingSettings) -> str:
    """Give the files' paths in the database the beginning that `tracking.artifact_location` has; says what changed."""
    if settings.database is None:
        raise ValueError(
            f"tracking.uri = {settings.uri!r} is no SQLite file, so the paths in it cannot be changed here. Instead "
            f"{way_to_moved_files(settings, 'OLD')}; `python -m tasks registry show` names OLD where it does not exist."
        )
    database, new = database_of(settings), Path(settings.artifact_location).absolute()
    old = stored_location(database, settings.experiment)
    if old in (None, str(new)):
        return f"{database}: its files are under {new}, nothing changed"
    if not new.is_dir():
        raise ValueError(
            f"{new} does not exist, and the registry's files have to be there before its database can name them. Move "
            f"them from {old}, or correct tracking.artifact_location."
        )
    count = replace_location(database, str(old), str(new))
    return f"{database}: {counted(count, 'path')} moved from {old} to {new}"


def copied_note(settings: TrackingSettings) -> str | None:
    """A sentence where this project has a copy of another project's database, which names the other's files."""
    if settings.database is None or settings.files is None:
        return None
    database, here = database_of(settings), Path.cwd()
    if not (database.exists() and database.is_relative_to(here)):
        return None
    stored = stored_location(database, settings.experiment)
    old = None if stored is None or "://" in stored else Path(stored)
    if old is None or old.is_relative_to(here) or not old.is_dir():  # where they are gone, the first use says so
        return None
    if not any((folder / PARAMS_FILE).exists() for folder in old.parents):
        return None
    return (
        f"{database} is a copy: its files are read in {old}, which another project changes. If this project has copies "
        f"of them, run `python -m tasks registry relocate`."
    )


def stored_location(database: Path, experiment: str) -> str | None:
    """Where MLflow keeps the experiment's files; None where it does not know the experiment."""
    if not database.exists():
        raise ValueError(
            f"{database} does not exist, so there is no registry. Correct tracking.uri, or restore a backup."
        )
    with closing(sqlite3.connect(database)) as connection:
        row = connection.execute("SELECT artifact_location FROM experiments WHERE name = ?", (experiment,)).fetchone()
    return None if row is None else str(row[0]).removeprefix(FILE)


def replace_location(database: Path, old: str, new: str) -> int:
    """In one transaction; the number of paths that changed."""
    with closing(sqlite3.connect(database)) as connection, connection:
        return sum(
            connection.execute(
                f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                f"WHERE {column} = :old OR substr({column}, 1, length(:old) + 1) = :old || '/'",
                {"old": before, "new": after},
            ).rowcount
            for table, column in LOCATIONS
            for before, after in ((old, new), (FILE + old, FILE + new))
        )
