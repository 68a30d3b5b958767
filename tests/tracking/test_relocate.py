"""MLflow's database after its folder was moved, with MLflow's own client."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasks.commands.registry import adopt, show
from tasks.commands.rollback import rollback
from tasks.core.settings import Paths
from tasks.tracking.connection import connect, experiment_id
from tasks.tracking.registry import Registry
from tasks.tracking.relocate import LOCATIONS, copied_note, relocate, way_to_moved_files
from tests.tracking.candidates import promote
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
def test_a_registry_whose_files_are_elsewhere_is_not_called_lost(registry: Registry, tmp_path: Path):
    """Neither shown as a lost journal nor adopted as one; back in their place nothing has changed."""
    files, elsewhere = Path("artifacts/mlflow/artifacts").absolute(), tmp_path / "files"
    promote("a")
    files.rename(elsewhere)
    for read in (lambda: list(show()), lambda: rollback(reason="x"), lambda: adopt(reason="x"), lambda: promote("b")):
        registry.journal = None
        with pytest.raises(ValueError, match=r"does not exist here.*`python -m tasks registry relocate`") as caught:
            read()
        assert str(files) in str(caught.value) and "registry adopt" not in str(caught.value)
    elsewhere.rename(files)
    assert any("promotion" in line for line in show())


def test_where_files_of_a_server_were_moved_they_are_linked_and_no_path_is_changed(project: Paths):
    """A server's database is its own: 5000 and 5432 are MLflow's and Postgres' ports, and nobody is asked."""
    for uri in ("http://127.0.0.1:5000", "postgresql://127.0.0.1:5432/mlflow"):
        settings = SETTINGS.model_copy(update={"uri": uri})
        told = way_to_moved_files(settings, "/old/files")
        assert "link /old/files" in told and "tracking.artifact_location to /old/files" in told
        assert "relocate" not in told
        with pytest.raises(ValueError, match=r"ln -s.*tracking\.artifact_location.*registry show") as caught:
            relocate(settings)
        assert "pg_dump" not in str(caught.value)


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
