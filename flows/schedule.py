"""python -m flows.schedule CRON [CHECK_CRON]: Prefect's runner for the deployments, started and ended by
`supervisor.py`.

A run that is due while another runs is skipped or waits, as `pipeline.on_busy` says (`turn.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.runner import Runner

from flows.connection import check_server
from flows.cron import NEXT, next_run
from flows.deployments import plan_deployments, schedule_runs
from flows.prefect_runs import prepare_schedule
from flows.server import PASSWORD_FILE, is_own_server, wait_for_health
from tasks.core.surroundings import seconds_since_start
from tasks.core.terminal import tell
from tasks.core.workspace import as_shell_sees
from tasks.pipeline.cli_errors import one_line_errors

HEAR_SECONDS = 5.0  # the supervisor checks more often


def main(cron: str, check_cron: str | None = None) -> None:
    begun = datetime.now(UTC) - timedelta(seconds=seconds_since_start())  # what is due while Prefect starts is run too
    with one_line_errors(debug=False):
        planned = plan_deployments(cron, check_cron)
        if is_own_server():
            _wait_for_server()
            prepare_schedule()
            _keep_runner_storage(Path(os.environ["PREFECT_HOME"]))
        else:
            check_server()
        runner = Runner(name="turnwise", pause_on_shutdown=False, limit=None)
        for deployment in planned:
            schedules = [deployment.schedule] if deployment.schedule else None
            registered = runner.add_flow(deployment.flow, name=deployment.name, schedules=schedules)
            with get_client(sync_client=True) as client:
                schedule_runs(client, registered, since=begun)
        assert planned[0].schedule is not None
        tell(_greeting(planned[0].schedule, begun))
        asyncio.run(runner.start())


def _wait_for_server() -> None:
    """The server started with this process. If it dies, the supervisor prints why and ends this process."""
    try:
        wait_for_health(os.environ["PREFECT_API_URL"])
    except OSError as error:
        time.sleep(HEAR_SECONDS)
        raise ValueError(f"Prefect's server does not answer ({error}), so no run would ever start.") from None


def _keep_runner_storage(home: Path) -> None:
    """Put the runner's folder into `home`, and not where temporary files are: there another user could create it first.
    A killed runner leaves its folder.
    """
    shutil.rmtree(home / "runner_storage", ignore_errors=True)
    tempfile.tempdir = str(home)


def _greeting(schedule: CronSchedule, begun: datetime) -> str:
    page = os.environ["PREFECT_API_URL"].removesuffix("/api")
    if is_own_server():
        file = Path(os.path.relpath(os.environ["PREFECT_HOME"])) / PASSWORD_FILE
        page = f"{page} (password: {as_shell_sees(file)})"
    return f"Prefect's page: {page}. Next run: {next_run(schedule, begun):{NEXT}}. Ctrl-C ends."


if __name__ == "__main__":
    main(*sys.argv[1:])
