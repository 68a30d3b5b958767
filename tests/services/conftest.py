"""Toy projects on real servers: a new one for each drill, and one left running; what it started ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.pipeline.toy_project import make_toy_project
from tests.services.fixtures import Services
from tests.services.installation import Installation
from tests.services.servers import wait_until


@pytest.fixture
def installation(tmp_path: Path, services: Services, request: pytest.FixtureRequest) -> Iterator[Installation]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    installation = Installation(make_toy_project(tmp_path / "project"), services, name)
    yield installation
    for process in installation.project.processes():
        process.kill()


@pytest.fixture(scope="session")
def scheduled(tmp_path_factory: pytest.TempPathFactory, services: Services) -> Iterator[Installation]:
    """A workspace left running: its deployments, a worker, a schedule and the automations.

    Its first run comes 20 to 80 s later: see `scheduled_meanwhile`.
    """
    installation = Installation(make_toy_project(tmp_path_factory.mktemp("story") / "project"), services, "story")
    installation.deploy("--cron", cron_soon(), "--automations")
    with installation.worker().running():
        yield installation
    for process in installation.project.processes():
        process.kill()


@pytest.fixture
def scheduled_meanwhile(scheduled: Installation) -> Iterator[None]:
    """The first scheduled run comes while the test works, and is over before the next test, which may kill a server."""
    yield
    wait_until(scheduled.runs, "the scheduled run", 240, pause=1)
    scheduled.ended_run(scheduled.runs()[0]["id"])


def cron_soon() -> str:
    """A minute that begins in 20 to 80 s: the deployments and the worker are there by then."""
    due = datetime.now(UTC).astimezone() + timedelta(seconds=80)
    return f"{due.minute} * * * *"
