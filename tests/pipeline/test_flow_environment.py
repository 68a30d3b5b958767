"""What a flow's server and its stages find in their environment: a server that is ours alone, and stages without it."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import prefect_runs
from flows.prefect_runs import check_run_is_wanted, close_dead_runs, prepare_schedule
from flows.processes import child_environment
from flows.retrain import _run
from flows.server import OWN_SERVER_VARIABLE, Server, find_serve, forget_killed_serve, prepare_environment, start_server
from flows.supervisor import _wait
from tasks.core.child_processes import ChildProcess
from tasks.core.fork_request import differs
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tasks.pipeline.run_lock import SERVE, only_run
from tasks.tracking.metrics import quiet_mlflow, wait_for_restarts
from tests.profiles import profile_text

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
    with pytest.raises(ValueError, match="--port 4201 is for the server that turnwise starts"):
        start_server(with_scheduler=True, port=4201)
    server = start_server(with_scheduler=True)
    assert server.process is None
    server.stop()
    assert theirs.items() <= environment.items()
    assert OWN_SERVER_VARIABLE not in environment


def test_a_port_that_is_taken_is_one_line(environment: dict[str, str], tmp_path: Path):
    prepare_environment(tmp_path, shows_log=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} is not available .*choose another port"):
            start_server(with_scheduler=True, port=port)


def test_a_stage_gets_no_password_and_calls_nobody(environment: dict[str, str]):
    environment |= {"PREFECT_API_AUTH_STRING": "secret", "PREFECT_SERVER_API_AUTH_STRING": "secret"}
    environment |= {"PREFECT_API_URL": "http://127.0.0.1:1/api", OWN_SERVER_VARIABLE: "1"}
    found = child_environment()
    assert not [name for name in found if name.startswith("PREFECT_") and name not in TELEMETRY_OFF]
    assert OWN_SERVER_VARIABLE not in found
    assert "secret" not in found.values()
    assert TELEMETRY_OFF.items() <= found.items()


def test_what_a_user_said_of_telemetry_holds_for_stages_too(environment: dict[str, str]):
    """The rule of `switch_telemetry_off`."""
    environment["DO_NOT_TRACK"] = environment["MLFLOW_DISABLE_TELEMETRY"] = "as I said"
    found = child_environment()
    assert found["DO_NOT_TRACK"] == found["MLFLOW_DISABLE_TELEMETRY"] == "as I said"
    assert found["DVC_NO_ANALYTICS"] == "1"


def test_what_a_flow_imports_later_changes_nothing_that_a_fork_server_looks_at(environment: dict[str, str]):
    environment.pop("HF_HUB_OFFLINE", None)  # as a person has it
    before = child_environment()
    quiet_mlflow()
    wait_for_restarts()
    assert differs(before, child_environment()) == set()


def test_a_server_that_died_is_named_with_its_last_words(tmp_path: Path):
    log = tmp_path / "server.log"
    process = ChildProcess([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], log=log)
    process.wait()
    dead = Server("http://127.0.0.1:1/api", process)
    assert dead.is_gone()
    assert f"(process {process.pid}) ended with status 3 (no room)" in dead.obituary()
    assert str(log) in dead.obituary()
    dead.stop()


def test_of_a_server_that_was_killed_serve_says_that_no_run_comes_and_nothing_of_what_it_had_logged(tmp_path: Path):
    program = "import os; print('(Background: https://sqlalche.me/e/20/e3q8)', flush=True); os.kill(os.getpid(), 9)"
    server = Server("http://127.0.0.1:1/api", ChildProcess([sys.executable, "-c", program], log=tmp_path / "serve.log"))
    assert server.process is not None
    server.process.wait()
    with pytest.raises(ValueError) as caught:
        _wait(server, ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"]))
    told = str(caught.value)
    assert "was ended by signal 9, so the schedule has ended" in told and "Start `python -m flows serve` again" in told
    assert "sqlalche" not in told and "promotes nothing" not in told


def test_a_command_beside_serve_finds_its_server_and_password_and_another_server_gets_neither(
    environment: dict[str, str], tmp_path: Path
):
    find_serve(tmp_path / "missing")
    assert "PREFECT_API_URL" not in environment
    prepare_environment(tmp_path, shows_log=False)
    server = start_server(with_scheduler=True)
    files = sorted(file for file in (tmp_path / ".prefect").iterdir() if file.name in ("address", "password"))
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    ours = {name: environment.pop(name) for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    with only_run(tmp_path, SERVE):
        find_serve(tmp_path)
        assert ours.items() <= environment.items()
        del environment["PREFECT_API_AUTH_STRING"]
        environment["PREFECT_API_URL"] = "http://127.0.0.1:1/api"
        find_serve(tmp_path)
        assert environment.pop("PREFECT_API_URL") == "http://127.0.0.1:1/api"
        assert "PREFECT_API_AUTH_STRING" not in environment
    find_serve(tmp_path)  # as after `kill -9`, when another program may have the port
    assert not ours.keys() & environment.keys()
    with only_run(tmp_path, SERVE):  # as of a `serve` that starts after it
        forget_killed_serve(tmp_path)
        find_serve(tmp_path)
        assert not ours.keys() & environment.keys()
    server.stop()
    assert not any(file.exists() for file in files)


class Answering(http.server.BaseHTTPRequestHandler):
    """`statuses` are of the next answers, the last one of all that follow. It has one run and nothing else."""

    state = "RUNNING"
    statuses: ClassVar[list[int]] = [200]

    def do_GET(self) -> None:
        run = {"id": RUN_ID, "flow_id": RUN_ID, "state": {"type": self.state, "name": self.state.title()}}
        body = json.dumps(run).encode()
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.send_response(status if "/flow_runs/" in self.path else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """A search, which finds nothing."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """Something that answers for one run, as this process's own server."""
    monkeypatch.setenv(OWN_SERVER_VARIABLE, str(os.getpid()))
    monkeypatch.setattr(prefect_runs, "own_run_id", lambda: RUN_ID)
    monkeypatch.setattr(prefect_runs, "OWN_PATIENCE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(prefect_runs, "FAILING_PATIENCE_SECONDS", (0.0, 0.0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as answering:
        thread = threading.Thread(target=answering.serve_forever)
        thread.start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{answering.server_port}/api"}):
            yield answering
        answering.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("statuses", [[200], [500, 500, 200]])
def test_a_run_that_prefect_has_as_running_goes_on_also_where_its_server_falters(
    own_server, monkeypatch: pytest.MonkeyPatch, statuses: list[int]
):
    monkeypatch.setattr(Answering, "statuses", statuses)
    check_run_is_wanted("promote")
    assert statuses == [200]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["CRASHED", "CANCELLING", "CANCELLED"])
def test_one_that_prefect_has_as_anything_else_stops_before_the_next_stage(own_server, monkeypatch, state: str):
    monkeypatch.setattr(Answering, "state", state)
    with pytest.raises(ValueError, match=f"this run as {state.title()}, not as running, so promote .* do not run"):
        check_run_is_wanted("promote")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "refuses the password"), (404, "does not know this run"), (500, r"does not answer \(status 500\)")],
)
def test_so_does_one_whose_server_does_not_say_so(own_server, monkeypatch, status: int, reason: str):
    monkeypatch.setattr(Answering, "statuses", [status])
    with pytest.raises(ValueError, match=f"{reason}.*, so promote and what follows do not run"):
        check_run_is_wanted("promote")


@pytest.mark.slow
def test_so_does_one_whose_server_died_which_is_not_asked_again(own_server, monkeypatch: pytest.MonkeyPatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv(OWN_SERVER_VARIABLE, str(ended.pid))
    monkeypatch.setattr(prefect_runs, "OWN_PATIENCE_SECONDS", (600.0,))
    own_server.server_close()
    with pytest.raises(ValueError, match="is gone, so train and what follows do not run"):
        check_run_is_wanted("train")


@pytest.mark.slow
def test_a_flow_asks_before_each_stage_so_an_unwanted_one_begins_and_promotes_nothing(own_server, monkeypatch):
    monkeypatch.setattr(Answering, "state", "CRASHED")
    with pytest.raises(ValueError, match="this run as Crashed, not as running, so promote"):
        _run("promote", None, None, None, {}, force=False)  # type: ignore[arg-type] # which it has no need of


@pytest.mark.slow
def test_a_schedule_starts_beside_a_run_by_hand_and_in_no_folder_that_takes_no_results(
    own_server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    closed: list[object] = []
    monkeypatch.setattr(prefect_runs, "close_killed_runs", closed.append)
    artifacts = tmp_path / "artifacts"
    with held_by_another(artifacts):
        prepare_schedule()
    assert closed == []  # they may be that run's
    prepare_schedule()
    assert len(closed) == 1
    (artifacts / ".flow.lock").unlink()
    artifacts.rmdir()
    artifacts.write_text("a file", encoding="utf-8")
    with pytest.raises(ValueError, match="artifacts"):
        prepare_schedule()


@pytest.mark.slow
def test_a_run_takes_all_others_for_dead_unless_a_serve_may_have_started_them(
    own_server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[bool] = []
    monkeypatch.setattr(prefect_runs, "crash_dead_runs", lambda client, *, is_only, own: asked.append(is_only))
    params = {"paths": {"artifacts": str(tmp_path / "artifacts")}}
    with held_by_another(tmp_path / "artifacts", ".serve.lock"):
        close_dead_runs(params)
    close_dead_runs(params)
    assert asked == [False, True]


@contextmanager
def held_by_another(artifacts: Path, lock_file: str = ".flow.lock") -> Iterator[None]:
    """The kernel's lock on a descriptor of our own is as good as another process's."""
    artifacts.mkdir()
    with (artifacts / lock_file).open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getppid()))
        lock.flush()
        yield
