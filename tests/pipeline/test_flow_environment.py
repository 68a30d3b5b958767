"""What a flow's server and its stages find in their environment: a server that is ours alone, and stages without it."""

from __future__ import annotations

import http.server
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import prefect_runs
from flows.prefect_runs import check_run_is_wanted
from flows.processes import Guardian
from flows.server import OWN_SERVER_VARIABLE, Server, prepare_environment, start_server
from flows.steps import child_environment
from tasks.command_line import TELEMETRY_OFF

RUN_ID = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment to change at will, of somebody who has never heard of Prefect."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "TURNWISE_"))}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def test_what_a_user_set_for_another_server_neither_opens_ours_nor_moves_its_files(
    environment: dict[str, str], tmp_path: Path
):
    """The longer names are aliases of the ones that we set, and would win over them."""
    foreign = {
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "*",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "false",
        "PREFECT_API_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:////tmp/elsewhere.db",
        "PREFECT_LOCAL_STORAGE_PATH": "/tmp/elsewhere",
        "PREFECT_HOME": "/tmp/elsewhere",
    }
    environment |= foreign | {"PREFECT_LOGGING_LEVEL": "DEBUG"}
    prepare_environment(tmp_path / "artifacts", shows_log=False)
    home = tmp_path / "artifacts" / ".prefect"
    assert environment["PREFECT_HOME"] == str(home)
    assert not set(foreign) - {"PREFECT_HOME"} & set(environment)
    assert environment["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_folder_an_older_turnwise_left_open_is_closed(environment: dict[str, str], tmp_path: Path):
    home = tmp_path / ".prefect"
    home.mkdir(mode=0o755)
    prepare_environment(tmp_path, shows_log=False)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_settings_of_a_server_the_user_named_are_left_alone(environment: dict[str, str], tmp_path: Path):
    theirs = {"PREFECT_API_URL": "http://127.0.0.1:4200/api", "PREFECT_API_AUTH_STRING": "me:mine"}
    environment |= theirs
    prepare_environment(tmp_path, shows_log=False)
    assert start_server(Guardian(), with_scheduler=True).process is None
    assert theirs.items() <= environment.items()
    assert OWN_SERVER_VARIABLE not in environment


def test_a_port_that_is_taken_is_one_line(environment: dict[str, str], tmp_path: Path):
    prepare_environment(tmp_path, shows_log=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} cannot be had .*choose another port"):
            start_server(Guardian(), with_scheduler=True, port=port)


def test_a_stage_gets_no_password_and_calls_nobody(environment: dict[str, str]):
    environment |= {"PREFECT_API_AUTH_STRING": "secret", "PREFECT_SERVER_API_AUTH_STRING": "secret"}
    environment |= {"PREFECT_API_URL": "http://127.0.0.1:1/api", OWN_SERVER_VARIABLE: "1"}
    found = child_environment()
    assert not [name for name in found if name.startswith("PREFECT_") and name not in TELEMETRY_OFF]
    assert OWN_SERVER_VARIABLE not in found
    assert "secret" not in found.values()
    assert TELEMETRY_OFF.items() <= found.items()


def test_a_server_that_died_is_named_with_its_last_words(tmp_path: Path):
    log = tmp_path / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], stdout=stream)
    process.wait()
    dead = Server("http://127.0.0.1:1/api", process, log)
    assert dead.is_gone()
    assert f"(process {process.pid}) ended with status 3 (no room)" in dead.obituary()
    assert str(log) in dead.obituary()


class Answering(http.server.BaseHTTPRequestHandler):
    state = "RUNNING"

    def do_GET(self) -> None:
        run = {"id": RUN_ID, "flow_id": RUN_ID, "state": {"type": self.state, "name": self.state.title()}}
        body = json.dumps(run).encode()
        self.send_response(401 if self.state == "UNKNOWN" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """Something that answers for one run, as this process's own server."""
    monkeypatch.setenv(OWN_SERVER_VARIABLE, "1")
    monkeypatch.setattr(prefect_runs, "own_run_id", lambda: RUN_ID)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as answering:
        thread = threading.Thread(target=answering.serve_forever)
        thread.start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{answering.server_port}/api"}):
            yield answering
        answering.shutdown()
        thread.join()


def test_a_run_that_prefect_has_as_running_goes_on(own_server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Answering, "state", "RUNNING")
    check_run_is_wanted("promote")


@pytest.mark.parametrize("state", ["CRASHED", "CANCELLING", "CANCELLED"])
def test_one_that_prefect_has_as_anything_else_stops_before_the_next_stage(own_server, monkeypatch, state: str):
    monkeypatch.setattr(Answering, "state", state)
    with pytest.raises(ValueError, match=f"this run as {state.title()}, not as running, so promote .* do not run"):
        check_run_is_wanted("promote")


def test_so_does_one_whose_server_knows_it_no_more_or_is_gone(own_server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Answering, "state", "UNKNOWN")
    with pytest.raises(ValueError, match="does not answer, so promote and what follows do not run"):
        check_run_is_wanted("promote")
    own_server.server_close()
    with pytest.raises(ValueError, match="does not answer, so train and what follows do not run"):
        check_run_is_wanted("train")
