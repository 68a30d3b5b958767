"""A project folder with an MLflow of its own; the database is made once and copied, since making one takes 2 s."""

from __future__ import annotations

import shutil
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
