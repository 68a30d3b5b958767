"""Checks of SQLite files: libraries crash on a damaged file, or silently treat an empty one as new. And the empty ones
that a library begins with.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Collection
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from tasks.core.files import atomic_file
from tasks.core.text import one_line

WAIT_SECONDS = 60  # for another process to finish writing
EMPTY = Path(sys.prefix) / "share" / "turnwise"  # what infra/locks/empty_databases.py made at set-up


def fault_of_database(file: Path, tables: Collection[str] = ()) -> str | None:
    """What is wrong with a SQLite file; None if every page is sound and all `tables` exist. Takes 0.3 s for 100 MB. A
    locked or unreadable file is not damaged.
    """
    if tables and file.stat().st_size == 0:
        return "it is empty"
    try:
        with closing(_opened(file)) as database:
            found = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            missing = sorted({*tables} - {name for (name,) in rows})
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    if found != "ok":
        return one_line(found)
    return f"it has no table {missing[0]!r}" if missing else None


def why_unusable(file: Path) -> str | None:
    """SQLite's message if the file cannot be read now, such as a lock; else None."""
    try:
        with closing(_opened(file)) as database:
            database.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError as error:
        return str(error)
    except sqlite3.DatabaseError:  # damaged: `fault_of_database` says how
        return None
    return None


def holds_rows(file: Path, tables: Collection[str]) -> bool:
    with closing(_opened(file)) as database:
        return any(database.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone() for table in tables)


def copy_empty(package: str, file: Path) -> bool:
    """Begin with the database that a library would make in seconds; False where set-up made none for its version, or
    there is a file. Where there is none, no journal of a former one is left either.
    """
    from filelock import FileLock

    made = EMPTY / f"{package}-{version(package)}.db"
    with FileLock(file.with_name(f".{file.name}.new")):  # or a second process might replace what a first has opened
        if file.exists():
            return False
        _remove_journals(file)
        if not made.exists():
            return False
        with atomic_file(file) as temporary:
            shutil.copyfile(made, temporary)
    return True


def _remove_journals(file: Path) -> None:
    """Of a database that is gone: SQLite would apply them to the next one."""
    for suffix in ("-journal", "-wal", "-shm"):
        file.with_name(f"{file.name}{suffix}").unlink(missing_ok=True)


def _opened(file: Path) -> sqlite3.Connection:
    """Never creates the file."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=WAIT_SECONDS)
