"""`serve` itself: keeps Prefect's server and the schedule running, and ends them, and all they started, as one.

Prefect's own runner waits for its flow to end before it heeds a signal, and leaves it running when it is killed. So the
runner (`schedule.py`) is a child in a process group of its own, beside the server; this process imports nothing of
Prefect, is always free to hear a signal, and has a guardian that ends both groups where it is killed. The flow that the
runner started has a guardian for its stages (`processes.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from flows.server import Server, start_server

LOOK_SECONDS = 0.2
# With STOP_SECONDS of the server 8 s: all has ended ten seconds after a signal.
CLOSING_SECONDS = 4.0  # what a flow at work has to end its stage and close its runs in MLflow
TELLING_SECONDS = 1.0  # what the runner then has to tell Prefect


def keep_schedule(cron: str, *, port: int) -> None:
    """Serve until a signal comes or one of the two children is gone; nothing is left running then, whatever the end."""
    server = start_server(with_scheduler=True, port=port)
    try:
        schedule = subprocess.Popen(
            [sys.executable, "-m", "flows.schedule", cron], stdin=subprocess.DEVNULL, start_new_session=True
        )
        server.guardian.watch(schedule.pid)
        try:
            _wait(server, schedule)
        finally:
            _end(schedule)
            server.guardian.forget(schedule.pid)
    finally:
        server.stop()


def _wait(server: Server, schedule: subprocess.Popen[bytes]) -> None:
    while schedule.poll() is None:
        if server.is_gone():
            raise ValueError(server.obituary())
        time.sleep(LOOK_SECONDS)
    if schedule.returncode > 0:  # it has said why
        raise SystemExit(schedule.returncode)
    raise ValueError(
        f"the schedule (process {schedule.pid}) was ended from outside (status {schedule.returncode}), so no run would "
        f"ever start again. Start `python -m flows serve` again: finished stages are not repeated."
    )


def _end(schedule: subprocess.Popen[bytes]) -> None:
    """The flow at work is asked to close its books; then the runner, which would only wait for it, is made to end."""
    with suppress(psutil.Error):
        flows = [child for child in psutil.Process(schedule.pid).children() if _is_flow(child)]
        for flow in flows:
            flow.terminate()
        psutil.wait_procs(flows, timeout=CLOSING_SECONDS)
        time.sleep(TELLING_SECONDS if flows else 0)
    with suppress(ProcessLookupError):
        os.killpg(schedule.pid, signal.SIGKILL)
    schedule.wait()


def _is_flow(process: psutil.Process) -> bool:
    """Beside the flow the runner has Python's resource tracker as a child, which heeds no signal."""
    return "spawn_main" in " ".join(process.cmdline())
