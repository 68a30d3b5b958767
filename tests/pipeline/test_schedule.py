"""Scheduled retraining, as people set it up: a real Prefect server with a work pool and a worker, and `flows serve`.

Each test waits for the clock to start a run nobody asked for, sees it complete, shuts everything down and looks for
what is left. Both wait together, and over stages that take a blink: the real ones run in every other file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.core.files import read_json
from tests.pipeline.prefect_api import free_port
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project

pytestmark = pytest.mark.slow

POOL = "turnwise"
PREFECT = str(Path(sys.executable).parent / "prefect")
# A run that is due before its schedule is known is left out: then the next one has to come while the test waits.
SECONDS_AHEAD, AGAIN_SECONDS = 15, 240
WAIT_SECONDS = 600


@pytest.fixture
def project(tmp_path: Path, databases: Path) -> Iterator[Project]:
    yield from ended(make_toy_project(tmp_path / "project").lay(databases))


@pytest.fixture(scope="module")
def serving(
    tmp_path_factory: pytest.TempPathFactory, databases: Path
) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A project in which `flows serve` has been started; its run is due in 40 to 100 s, and 5 minutes after that."""
    for project in ended(make_toy_project(tmp_path_factory.mktemp("serve") / "project").lay(databases)):
        due = datetime.now(UTC).astimezone() + timedelta(seconds=100)
        yield project, project.start("flows", "serve", "--cron", f"{due.minute},{(due.minute + 5) % 60} * * * *")


def ended(project: Project) -> Iterator[Project]:
    yield project
    for process in project.processes():
        process.kill()


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


class Prefect:
    """A Prefect of the project's own: its command line, its server's API, its long-running programs."""

    def __init__(self, project: Project):
        self.project, self.port = project, free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        home = project.artifacts / ".prefect"
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **project.environment(),
            "DO_NOT_TRACK": "1",
            "PREFECT_API_URL": self.url,
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        }

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [PREFECT, "--no-prompt", *arguments],
            cwd=self.project.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *arguments: str) -> Iterator[None]:
        """A program that stays until the block ends; Ctrl-C is how a person ends it."""
        log = self.project.folder.parent / f"{arguments[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PREFECT, *arguments],
                cwd=self.project.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ended_runs(self) -> list[dict[str, Any]]:
        """The runs that the schedule made and that are over."""
        states = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]
        wanted = {"flow_runs": {"state": {"type": {"any_": states}}}}
        request = urllib.request.Request(
            f"{self.url}/flow_runs/filter", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return [run for run in json.loads(answer.read()) if run["auto_scheduled"]]


def schedule_soon(project: Project) -> None:
    """The deployment as it stands in infra/prefect.yaml, but due in a few seconds."""
    file = project.folder / "infra" / "prefect.yaml"
    described = yaml.safe_load(file.read_text(encoding="utf-8"))
    soon = datetime.now(UTC) + timedelta(seconds=SECONDS_AHEAD)
    described["deployments"][0]["schedules"] = [{"interval": AGAIN_SECONDS, "anchor_date": soon.isoformat()}]
    file.write_text(yaml.safe_dump(described), encoding="utf-8")


@pytest.mark.usefixtures("serving")
def test_a_worker_runs_the_flow_when_its_schedule_says_so(project: Project):
    prefect = Prefect(project)
    with prefect.running("server", "start", "--host", "127.0.0.1", "--port", str(prefect.port), "--no-ui"):
        wait_for(prefect.is_up, WAIT_SECONDS)
        prefect.run("work-pool", "create", POOL, "--type", "process")
        schedule_soon(project)
        prefect.run("deploy", "--all", "--prefect-file", "infra/prefect.yaml")
        with prefect.running("worker", "start", "--pool", POOL, "--limit", "1"):
            wait_for(prefect.ended_runs, WAIT_SECONDS)
            first = prefect.ended_runs()[0]
    assert first["state_type"] == "COMPLETED", first["state"]
    assert project.decision()["decision"] == "promote"
    record = read_json(project.artifacts / "run.json")
    assert set(record["cached"].values()) == {False}
    assert (project.artifacts / "report" / "index.html").exists()
    assert not prefect.is_up()
    wait_for(lambda: project.processes() == [], WAIT_SECONDS)
    assert [path for path in project.home.rglob("*") if path.is_file()] == []


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
    assert "Finished in state Completed()" in output + errors
    assert "Traceback" not in output + errors
    assert read_json(record)["champion"]["promoted"] is True
    wait_for(lambda: toy.processes() == [], WAIT_SECONDS)
    assert [path for path in toy.home.rglob("*") if path.is_file()] == []
