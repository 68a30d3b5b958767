"""An MLflow database that is made once per session, and a folder in which tests use it one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracking.project import make_database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="session")
def used_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For `enter_project_again`."""
    return tmp_path_factory.mktemp("project")
