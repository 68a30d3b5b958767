"""Scheduled retraining on one machine: `flows serve` waits for the clock and starts a run that nobody asked for.

Over stages that take a blink: the real ones run in every other file. A schedule on a server of its own, with a work
pool and a worker, is in `tests/services/test_story.py`.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project

pytestmark = pytest.mark.slow

WAIT_SECONDS = 600


@pytest.fixture
def serving(tmp_path: Path, databases: Path) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A project in which `flows serve` has been started."""
    project = make_toy_project(tmp_path / "project").lay(databases)
    yield project, project.start("flows", "serve", "--cron", cron_soon())
    for process in project.processes():
        process.kill()


def cron_soon() -> str:
    """Due in 20 to 80 s, and 5 minutes after that."""
    due = datetime.now(UTC).astimezone() + timedelta(seconds=80)
    return f"{due.minute},{(due.minute + 5) % 60} * * * *"


def wait_for(is_there: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.5)


def is_run_under_way(project: Project) -> bool:
    """Whether `serve` still has the process in which Prefect runs the flow, which it spawns."""
    for process in project.processes():
        with suppress(psutil.Error):
            if "multiprocessing.spawn" in " ".join(process.cmdline()):
                return True
    return False


def test_serve_needs_no_server_of_anyones_and_runs_the_flow_on_its_schedule(
    serving: tuple[Project, subprocess.Popen[str]],
):
    toy, serve = serving
    record = toy.artifacts / "run.json"
    try:
        wait_for(lambda: record.exists() or serve.poll() is not None, WAIT_SECONDS)
        wait_for(lambda: (toy.artifacts / "report" / "index.html").exists(), WAIT_SECONDS)
        wait_for(lambda: not is_run_under_way(toy), WAIT_SECONDS)
        time.sleep(5)  # Prefect takes note of it
    finally:
        serve.send_signal(signal.SIGINT)
        output, errors = serve.communicate(timeout=WAIT_SECONDS)
    assert "Prefect's page: http://127.0.0.1:" in output
    assert "Finished in state Promoted(" in output + errors
    assert "Traceback" not in output + errors
    assert read_json(record)["champion"]["promoted"] is True
    wait_for(lambda: toy.processes() == [], WAIT_SECONDS)
    assert [path for path in toy.home.rglob("*") if path.is_file()] == []
