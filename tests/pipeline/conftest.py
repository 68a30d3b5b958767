"""One finished flow on the test profile, which every file that only looks at it or copies it shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.project import Project, make_project
from tests.tracking.project import make_database

START_PREFECT = """
from pathlib import Path
from flows.server import prepare_environment, start_server
prepare_environment(Path("artifacts"), shows_log=False)
start_server(with_scheduler=False).wait_until_up()
"""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One flow on the test profile; tests that change anything copy it first."""
    project = make_project(tmp_path_factory.mktemp("finished") / "project")
    project.flow()
    return project


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefect's and MLflow's databases with their tables and nothing in them, which take 7 s to make (see
    `Project.lay`).
    """
    project = make_project(tmp_path_factory.mktemp("databases") / "project")
    project.run_code(START_PREFECT)
    (project.artifacts / ".prefect" / "server.log").unlink()
    (project.artifacts / "mlflow").mkdir()
    make_database(project.artifacts / "mlflow").rename(project.artifacts / "mlflow" / "mlflow.db")
    return project.artifacts
