"""Promotion against a real MLflow server: two projects on it at once, and a server that dies in the middle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking.aliases import TRANSITION, open_registry
from tasks.tracking.registry import Registry
from tasks.tracking.runs import close_killed_runs
from tasks.tracking.settings import TrackingSettings
from tests.services.servers import QUIET, reserved_port
from tests.tracking.candidates import MODEL, drill, fork_server, promote, state, two_at_once, work, write_project

pytestmark = pytest.mark.slow


class Server:
    """`mlflow server` on one database and one folder of files, which may be killed and started again."""

    def __init__(self, folder: Path, database: Path):
        shutil.copy(database, folder / "server.db")
        self.folder = folder
        self.place = reserved_port()
        self.port = self.place.getsockname()[1]
        self.tracking = TrackingSettings(
            uri=f"http://127.0.0.1:{self.port}",
            artifact_location="mlflow-artifacts:/travel",
            experiment="travel-desk",
            num_traces=0,
        )
        self.start()

    def start(self) -> None:
        stores = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--artifacts-destination", "files"]
        command = [sys.executable, "-m", "mlflow", "server", *stores, "--port", str(self.port), "--workers", "1"]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **QUIET},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.tracking.uri}/health", timeout=5).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), empty_database)
    yield server
    server.kill()
    server.place.close()


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_project(server.tracking)


def promoted_while_the_server_dies(server: Server, name: str, before: str) -> str:
    """What a promotion says whose server is killed before one of its writes."""
    context = fork_server()
    told = context.SimpleQueue()
    arguments = (str(Path.cwd()), name, server.tracking, before, server.process.pid, None, told)
    process = context.Process(target=drill, args=arguments)
    process.start()
    outcome, message = told.get()
    process.join(600)
    assert (outcome, server.process.wait()) == ("refused", -signal.SIGKILL)
    return str(message)


def test_of_two_projects_on_one_server_one_wins_and_the_other_is_refused(server: Server, tmp_path: Path):
    promote("a", tracking=server.tracking)
    results = sorted(two_at_once(server.tracking, tmp_path))
    assert [outcome for outcome, _ in results] == ["promoted", "refused"]
    assert "version 2 is champion while this decision was made against version 1" in results[1][1]
    registry = Registry(server.tracking, MODEL)
    assert state(registry) == (2, 1)
    assert registry.numbers() == [1, 2]


@dataclass(frozen=True, slots=True)
class Worker:
    """A flow in a process of its own that works on a shared server, in a folder of the same path as everybody's."""

    process: Any
    run_id: str

    @classmethod
    def start(cls, server: Server, host: str | None = None) -> Worker:
        context = fork_server()
        told = context.SimpleQueue()
        process = context.Process(target=work, args=(str(Path.cwd()), server.tracking, host, told))
        process.start()
        return cls(process, told.get())

    def kill(self) -> None:
        self.process.kill()
        self.process.join(600)


def test_a_worker_leaves_the_runs_of_another_alone_until_its_process_is_known_to_be_gone(server: Server):
    """On the same path of one server: a living process, one of another host, and one of this that was killed."""
    living, elsewhere, dead = Worker.start(server), Worker.start(server, host="another-host"), Worker.start(server)
    elsewhere.kill()
    dead.kill()
    close_killed_runs(server.tracking)
    client = Registry(server.tracking, MODEL).client
    statuses = {name: client.get_run(name).info.status for name in (living.run_id, elsewhere.run_id, dead.run_id)}
    living.kill()
    assert statuses == {living.run_id: "RUNNING", elsewhere.run_id: "RUNNING", dead.run_id: "KILLED"}
    close_killed_runs(server.tracking)
    assert client.get_run(living.run_id).info.status == "KILLED"
    assert client.get_run(elsewhere.run_id).info.status == "RUNNING"


def test_a_name_with_spaces_and_letters_of_its_own_goes_all_the_way_over_a_server(server: Server, tmp_path: Path):
    name = "Reiseb\u00fcro 2.5 (\u65c5)"
    promote("a", tracking=server.tracking, model=name)
    registry = Registry(server.tracking, name)
    fetched = registry.fetch(registry.champion(), tmp_path / "fetched")  # type: ignore[arg-type]
    assert (fetched / "model.safetensors").read_bytes() == b"a"


def test_a_server_that_dies_in_mid_promotion_is_one_line_and_the_next_call_completes_what_was_begun(
    server: Server, tmp_path: Path
):
    message = promoted_while_the_server_dies(server, "b", "the alias champion")
    assert message.startswith(f"tracking.uri = '{server.tracking.uri}': no server answers at that address")
    assert "\n" not in message and "Start the server" in message

    server.start()
    half_done = Registry(server.tracking, MODEL)
    assert state(half_done) == (2, 2)
    assert TRANSITION in half_done.model_tags()
    registry = open_registry(server.tracking, MODEL)
    assert state(registry) == (3, 2)
    assert promote("b", tracking=server.tracking).version == 3
    fetched = registry.fetch(registry.champion(), tmp_path / "fetched")  # type: ignore[arg-type]
    assert (fetched / "model.safetensors").read_bytes() == b"b"
    assert (fetched / "lineage" / "decision.json").exists()

    message = promoted_while_the_server_dies(server, "c", "the upload")  # it stays down
    assert "\n" not in message and "Start the server" in message
