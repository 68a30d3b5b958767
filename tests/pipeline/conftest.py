"""What the whole flows share: one finished flow on the test profile, empty databases, and one Prefect server.

A flow that starts a server of its own costs 7 s of a processor more than one that is told of another. Whether ours
starts, is closed to others and ends is what test_flow.py and test_serve.py look at.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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


KEEP_PREFECT = (
    START_PREFECT
    + """
import os, sys
print(os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"], flush=True)
sys.stdin.read()
"""
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect: dict[str, str]) -> Project:
    """One flow on the test profile; tests that change anything copy it first."""
    project = make_project(tmp_path_factory.mktemp("finished") / "project")
    project.server = prefect
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


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory, databases: Path) -> Iterator[dict[str, str]]:
    """The variables that name a Prefect server which runs as long as the tests do."""
    project = make_project(tmp_path_factory.mktemp("prefect") / "project").lay(databases)
    server = subprocess.Popen(
        [sys.executable, "-c", KEEP_PREFECT], cwd=project.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**project.environment(), "PYTHONPATH": str(project.folder)}, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    url, password = server.stdout.readline().split()
    yield {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": password}
    server.communicate("")
