"""Scheduled retraining on one machine: `flows serve` waits for the clock and starts a run that nobody asked for.

Over stages that take a blink: the real ones run in every other file. The first run comes 20 to 80 s after the start,
while test_flow.py is at work (`fixtures.py`). A schedule on a server of its own, with a work pool and a worker, is in
`tests/services/test_story.py`.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project

pytestmark = pytest.mark.flow

WAIT_SECONDS = 600


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
    scheduled_toy: tuple[Project, subprocess.Popen[str]],
):
    toy, serve = scheduled_toy
    record = toy.artifacts / "run.json"
    lock = toy.artifacts / ".serve.lock"
    wait_for(lambda: lock.exists() and lock.read_text().startswith(f"{serve.pid} "), WAIT_SECONDS)
    second = toy.run("flows", "serve", "--cron", "0 3 * * *")  # which would have ended the schedule of the first
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"error: artifacts: another `serve` (process {serve.pid}) is at work in this folder"
    )
    assert second.stderr.count("\n") == 1
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
