"""The database of MLflow that tests of promotion begin with, and the folder in which it is opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracking.project import make_database


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="session")
def used_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")
