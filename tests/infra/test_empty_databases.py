"""A new folder begins with the databases that set-up made, as the installed Prefect and MLflow would make them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from tasks.core import databases
from tasks.core.databases import EMPTY, copy_empty, fault_of_database

MIGRATIONS = {
    "prefect": ("prefect", "server/database/_migrations", "versions/sqlite"),
    "mlflow": ("mlflow", "store/db_migrations", "versions"),
}


def newest_migration(package: str) -> str | None:
    name, folder, versions = MIGRATIONS[package]
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parent / folder
    return ScriptDirectory(str(place), version_locations=[str(place / versions)]).get_current_head()


@pytest.mark.slow
@pytest.mark.parametrize("package", MIGRATIONS)
def test_a_new_folder_begins_with_an_empty_database_that_lacks_no_migration(tmp_path: Path, package: str):
    file = tmp_path / f"{package}.db"
    stale = [tmp_path / f"{package}.db{suffix}" for suffix in ("-journal", "-wal", "-shm")]
    for journal in stale:
        journal.write_bytes(b"of a database that is gone")
    assert copy_empty(package, file)
    assert not any(journal.exists() for journal in stale)
    assert fault_of_database(file, {"alembic_version"}) is None
    with closing(sqlite3.connect(file)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        sizes = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
        (migration,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    assert migration == newest_migration(package)
    assert len(tables) > 20 and {name for name in tables if sizes[name]} <= {"alembic_version", "workspaces"}


def test_a_database_that_is_there_stays_and_one_of_another_version_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "prefect.db"
    file.write_bytes(b"of a user")
    assert not copy_empty("prefect", file)
    assert file.read_bytes() == b"of a user"
    assert (EMPTY / f"prefect-{version('prefect')}.db").exists()
    monkeypatch.setattr(databases, "version", lambda package: "0.0")
    assert not copy_empty("prefect", tmp_path / "other.db")
    assert [item.name for item in tmp_path.iterdir() if item.suffix == ".db"] == ["prefect.db"]
