"""`serve`: keeps Prefect's server and the schedule running, and ends both with all that they started.

Prefect's runner reacts to a signal only when its flow has ended, and a killed runner leaves its flow running. So the
runner is a child process, and this process, which does not import Prefect, always reacts to a signal.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import psutil

from flows.server import Server, start_server
from tasks.core.child_processes import ChildProcess

LOOK_SECONDS = 0.2
# With the server's STOP_SECONDS these are 8 s: everything has ended ten seconds after a signal.
CLOSING_SECONDS = 4.0  # for the flow, to end its stage and close its runs in MLflow
REPORTING_SECONDS = 1.0  # then for the runner, to report that to Prefect


def keep_schedule(cron: str, check_cron: str | None, *, port: int) -> None:
    """Serve until a signal comes or one of the two children ends; then nothing is left running."""
    crons = [cron, *([check_cron] if check_cron is not None else [])]
    refused = subprocess.run([sys.executable, "-m", "flows.cron", *crons], check=False).returncode
    if refused:  # it has printed why
        raise SystemExit(refused)
    server = start_server(with_scheduler=True, port=port)
    try:
        schedule = ChildProcess([sys.executable, "-m", "flows.schedule", *crons], grace_seconds=0)
        try:
            _wait(server, schedule)
        finally:
            _end(schedule)
    finally:
        server.stop()


def _wait(server: Server, schedule: ChildProcess) -> None:
    while schedule.is_alive():
        if server.is_gone():
            harm = "the schedule has ended and no scheduled run comes"
            raise ValueError(server.obituary(harm, remedy="Start `python -m flows serve`"))
        time.sleep(LOOK_SECONDS)
    status = schedule.wait()
    if status > 0:  # it has printed why
        raise SystemExit(status)
    raise ValueError(
        f"the schedule (process {schedule.pid}) {schedule.how_it_ended()}, so no scheduled run would start. "
        f"Start `python -m flows serve` again: finished stages are not repeated."
    )


def _end(schedule: ChildProcess) -> None:
    """Ask the flow to close its runs; then end the runner, which would only wait for that flow."""
    with suppress(psutil.Error):
        flows = [child for child in psutil.Process(schedule.pid).children() if _is_flow(child)]
        for flow in flows:
            flow.terminate()
        psutil.wait_procs(flows, timeout=CLOSING_SECONDS)
        time.sleep(REPORTING_SECONDS if flows else 0)
    schedule.stop()


def _is_flow(process: psutil.Process) -> bool:
    """The runner's other child is Python's resource tracker, which ignores signals."""
    return "spawn_main" in " ".join(process.cmdline())
