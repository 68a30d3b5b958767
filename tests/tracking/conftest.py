"""Every test in this folder gets a project of its own, and an empty MLflow in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.settings import Paths
from tests.tracking.project import enter_project, make_database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Paths:
    return enter_project(tmp_path, empty_database, monkeypatch)
