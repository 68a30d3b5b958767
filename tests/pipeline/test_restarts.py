"""`serve` is started again: the runs that the clock had planned go, and those that a person has a part in are given to
the new runner.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import AwaitingRetry, Failed, Running, Scheduled, Suspended

from flows.prefect_runs import prepare_schedule
from tests.profiles import profile_text

pytestmark = pytest.mark.slow

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def set_states(*states: Any) -> Callable[[SyncPrefectClient, UUID], None]:
    def set_them(client: SyncPrefectClient, run: UUID) -> None:
        for state in states:
            client.set_flow_run_state(run, state, force=True)

    return set_them


def answer(client: SyncPrefectClient, run: UUID) -> None:
    set_states(Running(), Suspended(pause_key="asked"))(client, run)
    client.resume_flow_run(run)


# What a person did before the restart, and what is done on the page after it.
RUNS: dict[str, tuple[Callable[[SyncPrefectClient, UUID], None], Callable[[SyncPrefectClient, UUID], Any] | None]] = {
    "suspended": (set_states(Running(), Suspended(pause_key="asked")), SyncPrefectClient.resume_flow_run),
    "answered": (answer, None),
    "failed": (set_states(Running(), Failed()), set_states(AwaitingRetry())),
    "retry": (set_states(Running(), Failed(), AwaitingRetry()), None),
    "late": (set_states(Scheduled(scheduled_time=NOW - HOUR, name="Late")), None),
    "planned": (set_states(Scheduled(scheduled_time=NOW + HOUR)), None),
}


def make_deployment(client: SyncPrefectClient, schedules: list[DeploymentScheduleCreate]) -> UUID:
    return client.create_deployment(
        client.create_flow(flow(some_flow)), "served agent", schedules=schedules, concurrency_limit=1
    )


def some_flow() -> None:
    pass


def given_to_the_runner(client: SyncPrefectClient, deployment: UUID) -> set[str]:
    return {run.name for run in client.get_scheduled_flow_runs_for_deployments([deployment], NOW + 2 * HOUR)}


def test_a_restart_loses_what_the_clock_planned_and_nothing_that_a_person_did(
    prefect_client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    each_hour = DeploymentScheduleCreate(schedule=CronSchedule(cron="30 * * * *"))
    deployment = make_deployment(prefect_client, [each_hour])
    late = {"start_time": str(NOW - 3 * HOUR), "min_runs": 2}
    prefect_client.request("POST", f"/deployments/{deployment}/schedule", json=late)
    assert len(given_to_the_runner(prefect_client, deployment)) >= 2
    runs = {name: prefect_client.create_flow_run_from_deployment(deployment, name=name).id for name in RUNS}
    for name, (before, _) in RUNS.items():
        before(prefect_client, runs[name])

    prepare_schedule()
    assert make_deployment(prefect_client, []) == deployment
    assert given_to_the_runner(prefect_client, deployment) == {"answered", "retry", "late", "planned"}
    for name, (_, after) in RUNS.items():
        if after is not None:
            after(prefect_client, runs[name])
    assert given_to_the_runner(prefect_client, deployment) == set(RUNS)
