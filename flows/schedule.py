"""python -m flows.schedule CRON: Prefect's runner for `retrain`, started and ended by `supervisor.py`.

A run that is due while another runs is skipped: two in one folder would overwrite each other's results, and a run that
waited would find nothing new.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.server.schemas.schedules import CronSchedule
from tzlocal import get_localzone_name

from flows.prefect_runs import prepare_schedule
from flows.retrain import retrain
from flows.server import PASSWORD_FILE, is_own_server, wait_for_health
from tasks.core.terminal import tell
from tasks.pipeline.cli_errors import one_line_errors

NAME = "retrain"
HEAR_SECONDS = 5.0  # the supervisor checks more often


def main(cron: str) -> None:
    with one_line_errors(debug=False):
        schedule = _schedule(cron)
        if is_own_server():
            _wait_for_server()
            prepare_schedule(f"{retrain.name}/{NAME}")
            _keep_runner_storage(Path(os.environ["PREFECT_HOME"]))
        runner = Runner(name=NAME, pause_on_shutdown=False, limit=None)
        skip = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
        runner.add_flow(retrain, name=NAME, schedule=schedule, concurrency_limit=skip)
        tell(_greeting(schedule))
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


def _schedule(cron: str) -> Schedule:
    """In the machine's time zone, since Prefect's default is UTC. ValueError for an invalid `cron`."""
    try:
        CronSchedule(cron=cron)
    except ValueError:
        raise ValueError(
            f"--cron {cron!r} is not a cron expression, so no run would ever start. "
            f'It needs five fields: minute, hour, day, month, weekday, as in "0 3 * * *".'
        ) from None
    return Cron(cron, timezone=get_localzone_name())


def _greeting(schedule: Schedule) -> str:
    page = os.environ["PREFECT_API_URL"].removesuffix("/api")
    if is_own_server():
        page = f"{page} (password: {os.path.relpath(os.environ['PREFECT_HOME'])}/{PASSWORD_FILE})"
    return f"Prefect's page: {page}. Next run: {_next_run(schedule):%a %Y-%m-%d %H:%M %Z}. Ctrl-C ends."


def _next_run(schedule: Schedule) -> datetime:
    assert schedule.cron is not None
    dates = CronSchedule(cron=schedule.cron, timezone=schedule.timezone).get_dates(n=1)
    return asyncio.run(dates)[0]


if __name__ == "__main__":
    main(sys.argv[1])
