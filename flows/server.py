"""Prefect's server for one command, and the environment variables that Prefect reads when it is imported.

Without PREFECT_API_URL we start a server on a loopback port. We do it and not Prefect, so that it starts while Prefect
is imported, ends with the flow even after `kill -9`, and has the scheduler and the page for `serve`.

Every user of the machine and every web page in a browser can reach a loopback port, and whoever may use Prefect can run
any code as its owner. So each start draws a password, passed on by environment variables only; other origins are
refused, a CSRF token is needed, and no page may frame it; its files are in artifacts/.prefect, which only the owner may
enter, with the address and password of `serve`'s page. This module does not import Prefect.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil

from tasks.core.aside import name_aside
from tasks.core.child_processes import ChildProcess
from tasks.core.databases import copy_empty, fault_of_database
from tasks.core.secrets import USER_INFO
from tasks.core.terminal import warn
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tasks.pipeline.order import NEW_OBJECTS
from tasks.pipeline.run_lock import SERVE, look_for_owner

STARTUP_SECONDS = 120  # 16 s were measured on a busy machine; Prefect's own limit of 20 s was too tight
STOP_SECONDS = 3.0  # between asking the server to end and ending it
UNWIND_SECONDS = 5.0  # for a flow without a server to end its stage and close its runs in MLflow
OWN_SERVER_VARIABLE = (
    "TURNWISE_OWN_SERVER"  # its process id, where the server is our own; for the flow and the schedule
)
TOLD_TO_END: dict[object, str] = {128 + number: number.name for number in (signal.SIGTERM, signal.SIGHUP)}  # by status
# What an automation sees a silent death by (infra/automations/crash.yaml); 30 s is the least that Prefect takes.
HEARTBEAT_VARIABLE, HEARTBEAT_SECONDS = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30"
PASSWORD_FILE, ADDRESS_FILE = "password", "address"  # in PREFECT_HOME, while `serve` is at work
LINK_OF_SQLALCHEMY = "https://sqlalche.me/"
# Set for a user's own server, these would open ours to others, or move its database out of artifacts/.
OF_ANOTHER_SERVER = ("PREFECT_API_", "PREFECT_SERVER_", "PREFECT_UI_", "PREFECT_RESULTS_", "PREFECT_LOCAL_STORAGE_")
PROGRAM = """
import gc, sys
gc.set_threshold(int(sys.argv[3]), *gc.get_threshold()[1:])
import uvicorn
from prefect.server.api.server import create_app
app = create_app(ephemeral=sys.argv[2] == "ephemeral")
no_frames = [("X-Frame-Options", "DENY"), ("Content-Security-Policy", "frame-ancestors 'none'")]
uvicorn.run(
    app, fd=int(sys.argv[1]), log_level="error", lifespan="on", timeout_graceful_shutdown=1, headers=no_frames
)
"""


def prepare_environment(artifacts: Path, *, shows_log: bool) -> None:
    """Set what Prefect reads at import. Values that the user set stay, except those that would open our server or move
    its files. Without `shows_log` Prefect prints nothing.
    """
    home = (artifacts / ".prefect").absolute()
    logging.raiseExceptions = shows_log  # of a log that a server which is gone cannot take
    _refuse_login_in_address()
    if not os.environ.get("PREFECT_API_URL"):
        for name in list(os.environ):
            if name.startswith(OF_ANOTHER_SERVER) and name not in TELEMETRY_OFF:
                del os.environ[name]
        os.environ["PREFECT_HOME"] = str(home)
        os.environ["PREFECT_PROFILES_PATH"] = str(home / "profiles.toml")
    wanted = {
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(STARTUP_SECONDS),
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # it writes to ~/.prefect, whatever PREFECT_HOME is
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",  # turnwise uses no blocks; 0.3 s per start
        HEARTBEAT_VARIABLE: HEARTBEAT_SECONDS,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO" if shows_log else "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "ERROR" if shows_log else "CRITICAL",  # of each heartbeat that is not taken
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",  # a finished flow waits for its last lines: 2 s by default
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    folder = Path(os.environ["PREFECT_HOME"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # Prefect warns where it is missing
    if folder == home:
        folder.chmod(0o700)  # an older turnwise left it open


def _refuse_login_in_address() -> None:
    if USER_INFO.search(os.environ.get("PREFECT_API_URL", "")):
        raise ValueError(
            "PREFECT_API_URL has a user name or password in it, which would be copied into logs and pages. Leave it "
            "out, and export PREFECT_API_AUTH_STRING as USER:PASSWORD."
        )


def is_own_server() -> bool:
    """Whether the server at PREFECT_API_URL was started for this folder alone, so that every run in it is ours."""
    return bool(os.environ.get(OWN_SERVER_VARIABLE))


def is_own_server_dead() -> bool:
    """For a flow of `serve` the server is not a child of this process."""
    return is_own_server() and not psutil.pid_exists(int(os.environ[OWN_SERVER_VARIABLE]))


@dataclass(slots=True)
class Server:
    """Prefect's server: the one at PREFECT_API_URL, or our own, which is a child process with a log."""

    url: str
    process: ChildProcess | None = None
    files: tuple[Path, ...] = ()  # which go with it
    is_stopping: bool = False

    def wait_until_up(self) -> None:
        """ValueError where our own server does not start; at once if it dies."""
        if self.process is None:
            return
        try:
            wait_for_health(self.url)
        except OSError as error:
            raise ValueError(
                f"Prefect's server did not start ({' '.join(self.process.last_lines()) or error}), so no flow can run. "
                f"See {self.process.log}."
            ) from None

    def is_gone(self) -> bool:
        return self.process is not None and not self.process.is_alive() and not self.is_stopping

    def obituary(self, harm: str = "the flow stops and promotes nothing", *, remedy: str = "Run") -> str:
        """`remedy`: what is to be done again."""
        assert self.process is not None
        # What a signal ended has said nothing of it; SQLAlchemy adds a line with a link to each error.
        lines = [line for line in self.process.last_lines(2) if LINK_OF_SQLALCHEMY not in line]
        reason = "".join(f" ({line})" for line in lines[-1:] if (self.process.process.poll() or 0) > 0)
        return (
            f"Prefect's server (process {self.process.pid}) {self.process.how_it_ended()}{reason}, so {harm}. Its log "
            f"is {self.process.log}. {remedy} again: finished stages are not repeated."
        )

    @contextmanager
    def end_this_process_with_it(self) -> Iterator[None]:
        """When our own server dies, end the block at once with status 1: Prefect would go on for hours. A signal that
        ends it is told: a log that just stops, as of a unit of systemd, says nothing.
        """
        if self.process is not None:
            threading.Thread(target=self._watch, name="prefect-server", daemon=True).start()
        try:
            yield
        except SystemExit as end:
            if self.is_gone():
                raise SystemExit(1) from None  # our own SIGTERM ended the block
            if name := TOLD_TO_END.get(end.code):
                warn(
                    f"error: the run was told to end ({name}); nothing is left half-written. Run again: finished "
                    f"stages are not repeated, and training goes on from its checkpoint."
                )
            raise

    def _watch(self) -> None:
        assert self.process is not None
        self.process.wait()
        if self.is_stopping:
            return
        warn(f"error: {self.obituary()}")
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread ends the stage and closes MLflow's runs
        time.sleep(UNWIND_SECONDS)
        os._exit(1)  # what is left only waits for the server; guardians end the children

    def stop(self) -> None:
        self.is_stopping = True
        if self.process is not None:
            self.process.stop()
        for file in self.files:
            file.unlink(missing_ok=True)
        atexit.unregister(self.stop)


def find_serve(artifacts: Path) -> None:
    """For a command beside the `serve` of this folder: name its server and password, where the user names no other. One
    that was killed left both files, and anybody may have its port by now.
    """
    try:
        with look_for_owner(artifacts, SERVE) as is_serving:
            if not is_serving:
                return
        password, url = (file.read_text(encoding="utf-8").strip() for file in _files_of_serve(artifacts / ".prefect"))
    except OSError:  # none is at work here, or its server is the user's
        return
    if not os.environ.get("PREFECT_API_URL"):
        os.environ["PREFECT_API_URL"] = url
    if os.environ["PREFECT_API_URL"] == url:
        os.environ.setdefault("PREFECT_API_AUTH_STRING", password)


def forget_killed_serve(artifacts: Path) -> None:
    """Remove what it left for `find_serve`. The caller is the `serve` of this folder by now."""
    for file in _files_of_serve(artifacts / ".prefect"):
        file.unlink(missing_ok=True)


def _files_of_serve(home: Path) -> tuple[Path, Path]:
    return home / PASSWORD_FILE, home / ADDRESS_FILE


def wait_for_health(url: str) -> None:
    """Our own server's socket is open from the start, so one request waits for it. OSError where nothing answers."""
    build_opener(ProxyHandler({})).open(f"{url}/health", timeout=STARTUP_SECONDS).close()


def start_server(*, with_scheduler: bool, port: int = 0) -> Server:
    """Start a server, unless PREFECT_API_URL names one; call `wait_until_up` before use. ValueError for a taken port.

    It ends at the interpreter's exit, after Prefect's threads have sent their last lines: without a server each of them
    retries for a minute.
    """
    if os.environ.get("PREFECT_API_URL"):
        if port:
            raise ValueError(
                f"--port {port} is for the server that turnwise starts, and PREFECT_API_URL names another, so nothing "
                f"would listen there. Omit --port, or unset PREFECT_API_URL."
            )
        return Server(os.environ["PREFECT_API_URL"])
    home = Path(os.environ["PREFECT_HOME"])
    refuse_damaged_history(home)
    copy_empty("prefect", home / "prefect.db")
    password = f"turnwise:{secrets.token_urlsafe(32)}"
    with _listen(port) as listener:
        page = f"http://127.0.0.1:{listener.getsockname()[1]}"
        _close_to_others(page, password)
        log_file = home / ("serve.log" if with_scheduler else "server.log")  # a `run` beside `serve` needs its own
        log_file.unlink(missing_ok=True)
        server = Server(f"{page}/api", _start_process(listener, log_file, with_scheduler))
    assert server.process is not None
    atexit.register(server.stop)
    if with_scheduler:
        server.files = _files_of_serve(home)
        for file, text in zip(server.files, (password, server.url), strict=True):
            _write_for_owner(file, text)
    os.environ["PREFECT_API_URL"] = server.url
    os.environ[OWN_SERVER_VARIABLE] = str(server.process.pid)
    return server


def refuse_damaged_history(home: Path) -> None:
    database = home / "prefect.db"
    fault = fault_of_database(database) if database.exists() else None
    if fault is not None:
        aside = name_aside(home, "damaged")
        command = f"mkdir {shlex.quote(str(aside))} && mv {shlex.quote(str(database))}* {shlex.quote(str(aside))}"
        raise ValueError(
            f"{database}: Prefect's database is damaged ({fault}), so its server cannot start. It contains the list of "
            f"past runs and their logs, but no model, result or registry. Restore it from a backup (python -m tasks "
            f"restore), or move it aside with `{command}` and run again: the list then starts empty."
        )


def _listen(port: int) -> socket.socket:
    """Open the server's socket here, so that no other program can take its port first."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart the port is free at once
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"--port {port} is not available ({error.strerror}), so Prefect's page cannot be shown there. "
            f"Stop the program that uses it, choose another port, or omit --port for any free one."
        ) from None
    listener.listen(128)
    return listener


def _close_to_others(page: str, password: str) -> None:
    os.environ.update(
        {
            "PREFECT_SERVER_API_AUTH_STRING": password,
            "PREFECT_API_AUTH_STRING": password,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": page,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_UI_API_URL": f"{page}/api",
        }
    )


def _write_for_owner(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text + "\n")


def _start_process(listener: socket.socket, log_file: Path, with_scheduler: bool) -> ChildProcess:
    """In its own session: Ctrl-C must not end it, since the flow still reports to it."""
    kind = "full" if with_scheduler else "ephemeral"
    command = [sys.executable, "-c", PROGRAM, str(listener.fileno()), kind, str(NEW_OBJECTS)]
    return ChildProcess(command, log=log_file, pass_fds=[listener.fileno()], grace_seconds=STOP_SECONDS)
