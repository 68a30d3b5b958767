"""`serve`: keeps Prefect's server and the schedule running, and ends both with all they started.

Prefect's own runner reacts to a signal only when its flow has ended, and leaves it running when it is killed. So the
runner (`schedule.py`) is a child process beside the server. This process imports nothing of Prefect, and can always
react to a signal. The flow that the runner starts guards its own stages (`processes.py`).
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import psutil

from flows.server import Server, start_server
from tasks.core.child_processes import ChildProcess

LOOK_SECONDS = 0.2
# With STOP_SECONDS of the server 8 s: all has ended ten seconds after a signal.
CLOSING_SECONDS = 4.0  # what a flow at work has to end its stage and close its runs in MLflow
REPORTING_SECONDS = 1.0  # what the runner then has to report that to Prefect


def keep_schedule(cron: str, *, port: int) -> None:
    """Serve until a signal comes or one of the two children is gone; nothing is left running then, whatever the end."""
    server = start_server(with_scheduler=True, port=port)
    try:
        schedule = ChildProcess([sys.executable, "-m", "flows.schedule", cron], grace_seconds=0)
        try:
            _wait(server, schedule)
        finally:
            _end(schedule)
    finally:
        server.stop()


def _wait(server: Server, schedule: ChildProcess) -> None:
    while schedule.is_alive():
        if server.is_gone():
            raise ValueError(server.obituary())
        time.sleep(LOOK_SECONDS)
    status = schedule.wait()
    if status > 0:  # it has said why
        raise SystemExit(status)
    raise ValueError(
        f"the schedule (process {schedule.pid}) {schedule.how_it_ended()}, so no run would ever start again. "
        f"Start `python -m flows serve` again: finished stages are not repeated."
    )


def _end(schedule: ChildProcess) -> None:
    """Ask the flow at work to close its runs; then end the runner, which would only wait for that flow."""
    with suppress(psutil.Error):
        flows = [child for child in psutil.Process(schedule.pid).children() if _is_flow(child)]
        for flow in flows:
            flow.terminate()
        psutil.wait_procs(flows, timeout=CLOSING_SECONDS)
        time.sleep(REPORTING_SECONDS if flows else 0)
    schedule.stop()


def _is_flow(process: psutil.Process) -> bool:
    """Beside the flow the runner has Python's resource tracker as a child, which heeds no signal."""
    return "spawn_main" in " ".join(process.cmdline())
