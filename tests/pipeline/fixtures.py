"""What the whole flows share: one finished flow on the test profile, empty databases, one Prefect server, and a
schedule that waits for its minute while others work.

A flow that starts a server of its own costs 7 s of a processor more than one that is told of another. Whether ours
starts, is closed to others and ends is what test_flow.py and test_serve.py look at.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.project import Project, make_project
from tests.pipeline.toy_project import make_toy_project
from tests.tracking.project import backup, make_database

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

KEEP_PREFECT = """
import os, sys
from pathlib import Path
from flows.server import prepare_environment, start_server
prepare_environment(Path("artifacts"), shows_log=False)
start_server(with_scheduler=False).wait_until_up()
print(os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect: dict[str, str]) -> Project:
    """One flow on the test profile; tests that change anything copy it first."""
    project = make_project(tmp_path_factory.mktemp("finished") / "project")
    project.server = prefect
    project.flow()
    return project


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, dict[str, str]]]:
    """A project whose Prefect server runs as long as the tests do, and the variables that name it."""
    project = make_project(tmp_path_factory.mktemp("prefect") / "project")
    server = subprocess.Popen(
        [sys.executable, "-c", KEEP_PREFECT], cwd=project.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**project.environment(), "PYTHONPATH": str(project.folder)}, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    url, password = server.stdout.readline().split()
    yield project, {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": password}
    server.communicate("")


@pytest.fixture(scope="session")
def prefect(served: tuple[Project, dict[str, str]], databases: Path) -> dict[str, str]:
    """The variables of that server, once its empty database has been copied."""
    return served[1]


@pytest.fixture
def prefect_client(prefect: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """Of that server, which is also this process's."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    password = prefect["PREFECT_API_AUTH_STRING"]
    named = {PREFECT_API_URL: prefect["PREFECT_API_URL"], PREFECT_API_AUTH_STRING: password}
    with temporary_settings(named), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def databases(served: tuple[Project, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefect's and MLflow's databases with their tables and nothing in them, which take 7 s to make (see
    `Project.lay`).
    """
    theirs = served[0].artifacts
    artifacts = tmp_path_factory.mktemp("databases") / "artifacts"
    shutil.copytree(theirs, artifacts, ignore=shutil.ignore_patterns("prefect.db*", "server.log"))
    backup(theirs / ".prefect" / "prefect.db", artifacts / ".prefect" / "prefect.db")
    (artifacts / "mlflow").mkdir()
    make_database(artifacts / "mlflow").rename(artifacts / "mlflow" / "mlflow.db")
    return artifacts


@pytest.fixture(scope="session")
def scheduled_toy(
    tmp_path_factory: pytest.TempPathFactory, databases: Path
) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A toy project in which `flows serve` has been started. The test that names it first (test_flow.py) works until
    the minute comes; test_schedule.py looks at what came of it.
    """
    project = make_toy_project(tmp_path_factory.mktemp("schedule") / "project").lay(databases)
    yield project, project.start("flows", "serve", "--cron", cron_soon())
    for process in project.processes():
        process.kill()


def cron_soon() -> str:
    """Due in 20 to 80 s, and 8 minutes after that."""
    due = datetime.now(UTC).astimezone() + timedelta(seconds=80)
    return f"{due.minute},{(due.minute + 8) % 60} * * * *"
