"""Every test in this folder gets a project of its own, and an empty MLflow in it; those of promotion, one together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core.settings import Paths
from tasks.tracking.journal import OWNER
from tasks.tracking.registry import Registry
from tests.tracking.candidates import MODEL, write_project
from tests.tracking.project import DATABASE, SETTINGS, enter_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Paths:
    return enter_project(tmp_path, empty_database, monkeypatch)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A project whose database is opened once, which takes a second, and whose registry is emptied after each test."""
    folder = tmp_path_factory.mktemp("project")
    (folder / DATABASE).parent.mkdir(parents=True)
    shutil.copy(empty_database, folder / DATABASE)
    return folder


@pytest.fixture
def registry(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry of a project in which challengers can be promoted (`candidates.py`)."""
    monkeypatch.chdir(shared_folder)
    write_project()
    registry = Registry(SETTINGS, MODEL)
    yield registry
    monkeypatch.chdir(shared_folder)  # a test may have gone to a folder of its own, which is gone by now
    registry.make_model()
    for model in registry.client.search_registered_models():
        registry.client.delete_registered_model(model.name)
    forget_journals(registry)
    for folder in ("mlflow/artifacts", "train", "evaluate", "curate"):
        shutil.rmtree(shared_folder / "artifacts" / folder, ignore_errors=True)


def forget_journals(registry: Registry) -> None:
    """Let no test find a journal of the one before, which outlives the registered model."""
    from mlflow.entities import ViewType

    of_any = f"tags.`{OWNER}` LIKE '%'"
    for run in registry.client.search_runs([registry.experiment_id], of_any, ViewType.ALL):
        if run.info.lifecycle_stage == "deleted":
            registry.client.restore_run(run.info.run_id)
        registry.client.delete_tag(run.info.run_id, OWNER)
