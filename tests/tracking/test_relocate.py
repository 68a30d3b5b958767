"""MLflow's database after its folder was moved, with MLflow's own client."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasks.core.settings import Paths
from tasks.tracking.connection import connect, experiment_id
from tasks.tracking.relocate import LOCATIONS, copied_note, relocate
from tests.tracking.project import SETTINGS

NO_FILES = {("workspaces", "trace_archival_location")}  # of MLflow's own workspaces, which turnwise does not use


@pytest.mark.slow
def test_a_registry_of_a_moved_folder_finds_its_files_after_one_command(
    project: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    client = connect(SETTINGS)
    run = client.create_run(experiment_id(client, SETTINGS)).info.run_id
    client.log_text(run, "kept", "said.txt")
    here, there = tmp_path / "artifacts", tmp_path / "moved" / "artifacts"
    there.parent.mkdir()
    here.rename(there)
    monkeypatch.chdir(there.parent)
    client = connect(SETTINGS)
    with pytest.raises(ValueError, match="registry relocate"):
        experiment_id(client, SETTINGS)
    relocate(SETTINGS)
    client = connect(SETTINGS)
    assert Path(client.download_artifacts(run, "said.txt")).read_text(encoding="utf-8") == "kept"
    assert experiment_id(client, SETTINGS)
    assert "nothing changed" in relocate(SETTINGS)


@pytest.mark.slow
def test_a_copy_beside_its_original_is_told_whose_files_it_reads(
    project: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The folder project/ is copied to copy/; where the original is gone or no project, there is nothing to mix up."""
    here, copy = tmp_path / "project", tmp_path / "copy"
    here.mkdir()
    (tmp_path / "artifacts").rename(here / "artifacts")
    (here / "params.yaml").touch()
    monkeypatch.chdir(here)
    client = connect(SETTINGS)
    (here / SETTINGS.artifact_location).mkdir()
    experiment_id(client, SETTINGS)
    assert copied_note(SETTINGS) is None
    shutil.copytree(here, copy)
    monkeypatch.chdir(copy)
    told = copied_note(SETTINGS) or ""
    assert str(here / SETTINGS.artifact_location) in told and "`python -m tasks registry relocate`" in told
    assert copied_note(SETTINGS.model_copy(update={"artifact_location": "mlflow-artifacts:/"})) is None  # no folder
    address = f"sqlite:///{here / str(SETTINGS.database)}"
    assert copied_note(SETTINGS.model_copy(update={"uri": address})) is None  # meant, as with --registry
    (here / "params.yaml").unlink()
    assert copied_note(SETTINGS) is None
    (here / "params.yaml").touch()
    relocate(SETTINGS)
    assert copied_note(SETTINGS) is None


def test_every_column_with_a_location_is_known(empty_database: Path):
    """A new version of MLflow may have others."""
    with closing(sqlite3.connect(empty_database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {(table, row[1]) for table in tables for row in connection.execute(f'PRAGMA table_info("{table}")')}
    assert set(LOCATIONS) <= columns
    found = {(table, column) for table, column in columns if "location" in column or column.endswith("_uri")}
    assert found <= {*LOCATIONS, *NO_FILES}
