"""The way to MLflow: everything stays in the project, and whatever is wrong is one line that says what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from mlflow import MlflowClient

from tasks.core import databases
from tasks.core.settings import Paths
from tasks.tracking.connection import absolute_location, absolute_uri, connect, experiment_id
from tasks.tracking.settings import TrackingSettings
from tests.conftest import ROOT
from tests.tracking.project import SETTINGS


def at(uri: str, location: str = "files") -> TrackingSettings:
    return TrackingSettings(uri=uri, artifact_location=location, experiment="travel-desk", num_traces=0)


def test_a_relative_sqlite_uri_becomes_absolute_and_its_folder_is_made(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_uri(at("sqlite:///a/b/mlflow.db")) == f"sqlite:///{tmp_path}/a/b/mlflow.db"
    assert (tmp_path / "a/b").is_dir()


def test_an_absolute_uri_stays_as_it_is(tmp_path: Path):
    assert absolute_uri(at(f"sqlite:///{tmp_path}/mlflow.db")) == f"sqlite:///{tmp_path}/mlflow.db"
    assert absolute_uri(at("http://127.0.0.1:5000")) == "http://127.0.0.1:5000"


def test_a_relative_artifact_location_becomes_absolute_and_a_bucket_stays(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_location(at(SETTINGS.uri, "artifacts/mlflow")) == f"{tmp_path}/artifacts/mlflow"
    assert absolute_location(at(SETTINGS.uri, "s3://bucket/mlflow")) == "s3://bucket/mlflow"


@pytest.mark.slow
def test_the_experiment_is_made_once(project: Paths):
    client = connect(SETTINGS)
    assert experiment_id(client, SETTINGS) == experiment_id(client, SETTINGS)


DIES = """
import os, signal, sqlite3, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from tasks.core import databases
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.connection import connect

databases.EMPTY = databases.EMPTY / "none"

@event.listens_for(Engine, "before_cursor_execute")
def die_in_the_middle(connection, cursor, statement, *rest):
    if "CREATE TABLE spans" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

connect(TrackingSettings(uri=sys.argv[1], artifact_location="files", experiment="travel-desk", num_traces=0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_database_whose_maker_was_killed_on_the_way_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
):
    """Its own name appears only when it is whole (it has 900 kB), so half of one never lies there. Nor does the journal
    of one that was removed get into the next: SQLite plays back whatever it finds beside a file of that name.
    `is_copied`: from the one that set-up made; else MLflow makes it.
    """
    database, half_made = tmp_path / "mlflow.db", tmp_path / ".mlflow.db.partial"
    settings = TrackingSettings(
        uri=f"sqlite:///{database}", artifact_location="files", experiment="travel-desk", num_traces=0
    )
    command = [sys.executable, "-c", DIES, settings.uri]
    maker = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert maker.returncode == -signal.SIGKILL
    assert half_made.exists() and not database.exists()
    journal = tmp_path / "mlflow.db-journal"
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(4096))

    if not is_copied:
        monkeypatch.setattr(databases, "EMPTY", tmp_path / "none")
    assert experiment_id(connect(settings), settings)
    assert not journal.exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.slow
def test_a_project_that_was_copied_with_its_database_does_not_write_into_the_old_folder(project: Paths):
    client = connect(SETTINGS)
    experiment_id(client, SETTINGS)
    elsewhere = SETTINGS.model_copy(update={"artifact_location": "/somewhere/else"})
    with pytest.raises(ValueError, match=r"would be written outside this folder.*registry relocate"):
        experiment_id(client, elsewhere)


def test_an_experiment_whose_files_are_in_a_folder_behind_another_machines_server_is_refused():
    """As it is where somebody made it without --artifact-location: only the server's machine has that folder."""
    settings = SETTINGS.model_copy(
        update={"uri": "http://mlflow.example.org:5000", "artifact_location": "s3://b/mlflow"}
    )
    kept = SimpleNamespace(lifecycle_stage="active", artifact_location="/srv/mlruns/1", experiment_id="1")
    client = cast(MlflowClient, SimpleNamespace(get_experiment_by_name=lambda name: kept))
    with pytest.raises(ValueError, match=r"/srv/mlruns/1.*another tracking\.experiment.*s3://b/mlflow"):
        experiment_id(client, settings)
    kept.artifact_location = "s3://elsewhere/mlflow/1"
    assert experiment_id(client, settings) == "1"
