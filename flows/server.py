"""Prefect's server for the length of one command, and the environment Prefect is imported in.

A run without PREFECT_API_URL gets a server of its own on a free loopback port. It is started here rather than by
Prefect so that it comes up while Prefect is imported, so that `kill -9` of the flow ends it too, and so that `serve`
gets the scheduler, which Prefect's own temporary server leaves out. Its database stays in artifacts/.prefect: past runs
can be looked at with `PREFECT_HOME=artifacts/.prefect prefect server start`. This module imports nothing of Prefect.
"""

from __future__ import annotations

import atexit
import os
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from flows.processes import Guardian
from tasks.databases import fault_of_database

STARTUP_SECONDS = 120  # 16 s was seen on a busy machine; Prefect's own limit of 20 s was too tight
PROGRAM = """
import sys, uvicorn
from prefect.server.api.server import create_app
app = create_app(ephemeral=sys.argv[2] == "ephemeral")
uvicorn.run(app, fd=int(sys.argv[1]), log_level="error", lifespan="on")
"""


def prepare_environment(artifacts: Path, *, shows_log: bool) -> None:
    """What must stand in the environment before Prefect is imported. A value the user set is left as it is.

    Without `shows_log` Prefect prints nothing: the terminal has the stages' own lines, and one where a stage fails.
    """
    wanted = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(STARTUP_SECONDS),
        "PREFECT_HOME": str((artifacts / ".prefect").absolute()),
        "PREFECT_PROFILES_PATH": str((artifacts / ".prefect" / "profiles.toml").absolute()),
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # writes to ~/.prefect whatever PREFECT_HOME says
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",  # turnwise uses no blocks; 0.3 s a start
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO" if shows_log else "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",  # of the default 2 s a finished flow waits for its last lines
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect warns where it is missing


def start_server(*, with_scheduler: bool) -> Callable[[], str]:
    """Start a server unless PREFECT_API_URL names one; gives a function that waits until it answers, for its URL.

    It ends at the interpreter's exit, after Prefect's own threads have sent it their last lines and events: ended any
    sooner, each of them retries for a minute.
    """
    if os.environ.get("PREFECT_API_URL"):
        return lambda: os.environ["PREFECT_API_URL"]
    refuse_damaged_history(Path(os.environ["PREFECT_HOME"]))
    log_file = Path(os.environ["PREFECT_HOME"]) / "server.log"
    guardian = Guardian()
    process, url = _start(log_file, "full" if with_scheduler else "ephemeral")
    guardian.watch(process.pid)
    atexit.register(_stop, process, guardian)
    os.environ["PREFECT_API_URL"] = url
    return lambda: _wait(process, url, log_file)


def refuse_damaged_history(home: Path) -> None:
    """ValueError where Prefect's database is damaged: its server would not start, and no flow would run."""
    database = home / "prefect.db"
    fault = fault_of_database(database) if database.exists() else None
    if fault is not None:
        raise ValueError(
            f"{database}: Prefect's database is damaged ({fault}), so its server cannot start. It holds the list of "
            f"past runs and their logs; without it these are lost, and no model, result or registry is. Remove it with "
            f"`rm {shlex.quote(str(database))}*`, and run again."
        )


def _stop(process: subprocess.Popen[bytes], guardian: Guardian) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    guardian.forget(process.pid)
    guardian.close()


def _start(log_file: Path, kind: str) -> tuple[subprocess.Popen[bytes], str]:
    """The server listens on a socket opened here, so no other program can take its port in between."""
    with socket.socket() as listener, log_file.open("wb") as log:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(listener.fileno()), kind],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches the flow, which still needs its server to say so
        )
        return process, f"http://127.0.0.1:{listener.getsockname()[1]}/api"


def _wait(process: subprocess.Popen[bytes], url: str, log_file: Path) -> str:
    """The socket already listens, so one request waits for the server; it fails at once if the server dies."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"{url}/health", timeout=STARTUP_SECONDS).close()
    except (OSError, urllib.error.URLError) as error:
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [str(error)]
        raise ValueError(
            f"Prefect's server did not start ({lines[-1][:300]}; process status {process.poll()}), so no flow can run. "
            f"The whole reason is in {log_file}."
        ) from None
    return url
