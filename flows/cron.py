"""When a schedule runs. `python -m flows.cron CRON [CHECK_CRON]` refuses those of `serve` in a second, before anything
starts; so this imports of Prefect no more than its schedules.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from prefect.client.schemas.schedules import CronSchedule
from prefect.server.schemas.schedules import CronSchedule as ServerCron
from tzlocal import get_localzone_name

from tasks.pipeline.cli_errors import one_line_errors

NUM_FIELDS = 5  # of a cron expression
DAYS_OF_A_YEAR = 366
NEXT = "%a %Y-%m-%d %H:%M %Z"  # the format of the next run
OPTIONS = ("--cron", "--check-cron")


def main(*crons: str) -> None:
    with one_line_errors(debug=False):
        for option, cron in zip(OPTIONS, crons, strict=False):
            read_schedule(option, cron)


def read_schedule(option: str, cron: str | None) -> CronSchedule | None:
    """In the machine's time zone, since Prefect's default is UTC. ValueError where no run would come, and for a sixth
    field, which Prefect would read as seconds after the weekday.
    """
    if cron is None:
        return None
    time_zone = _time_zone()
    try:
        schedule = CronSchedule(cron=cron, timezone=time_zone)
        if len(cron.split()) != NUM_FIELDS and not cron.startswith("@"):
            raise ValueError
        next_run(schedule)
    except ValueError:
        raise ValueError(
            f"{option} {cron!r} is not a cron expression of a date that comes, so no run would start when you mean. "
            f'It needs five fields: minute, hour, day, month, weekday, as in "0 3 * * *", or a name such as "@daily".'
        ) from None
    return schedule


def _time_zone() -> str:
    """The machine's, by name. ValueError for a TZ such as EST5EDT, which has none and would be read as UTC; also where
    the two differ in another season.
    """
    name, now = str(get_localzone_name()), datetime.now(UTC)
    dates = [now + timedelta(days=number) for number in range(DAYS_OF_A_YEAR)]
    if any(date.astimezone().utcoffset() != date.astimezone(ZoneInfo(name)).utcoffset() for date in dates):
        raise ValueError(
            f"TZ={os.environ.get('TZ', '')} is a rule, not the name of a time zone, and Prefect keeps a schedule by "
            f"name, so it would run in {name}. Set TZ to a name, such as Europe/Berlin."
        )
    return name


def next_run(schedule: CronSchedule, since: datetime | None = None) -> datetime:
    """The first from `since` (None: now) on. ValueError where none ever comes."""
    return asyncio.run(ServerCron(cron=schedule.cron, timezone=schedule.timezone).get_dates(n=1, start=since))[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
