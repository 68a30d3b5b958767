"""A project folder with an MLflow of its own; the database is made once and copied, since making one takes 2 s."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasks.core.settings import Paths
from tasks.tracking.connection import connect
from tasks.tracking.settings import TrackingSettings

DATABASE = Path("artifacts/mlflow/mlflow.db")
SETTINGS = TrackingSettings(
    uri=f"sqlite:///{DATABASE}",
    artifact_location="artifacts/mlflow/artifacts",
    experiment="travel-desk",
    num_traces=0,
)


def make_database(folder: Path) -> Path:
    """An MLflow database with its tables and nothing in them."""
    file = folder / "empty.db"
    connect(TrackingSettings(uri=f"sqlite:///{file}", artifact_location="unused", experiment="unused", num_traces=0))
    return file


def enter_project(folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Make `folder` the working directory of a project that has run nothing yet."""
    monkeypatch.chdir(folder)
    DATABASE.parent.mkdir(parents=True)
    shutil.copy(database, DATABASE)
    return Paths("artifacts")


def backup(source: Path, target: Path) -> None:
    """SQLite's own copy, which may be made into a database that others have open."""
    with closing(sqlite3.connect(source)) as left, closing(sqlite3.connect(target)) as right:
        left.backup(right)


def enter_project_again(folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """The same in a folder that tests before worked in, emptied: MLflow takes a second to open a database that is new
    to the process.
    """
    used = folder / DATABASE
    if not used.exists():
        return enter_project(folder, database, monkeypatch)
    monkeypatch.chdir(folder)
    backup(database, used)
    for item in [*folder.iterdir(), *used.parent.parent.iterdir(), *used.parent.iterdir()]:
        if item.is_file() and not item.name.startswith(used.name):
            item.unlink()
        elif item.is_dir() and item not in used.parents:
            shutil.rmtree(item)
    return Paths("artifacts")
