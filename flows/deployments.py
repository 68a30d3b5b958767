"""The deployments: `retrain` and `drift-check` on their schedules, `evaluate-snapshot` on demand.

`python -m flows deploy` registers them on a server for the workers of a pool, `serve` for one machine. A deployment has
the name of the model, so that one server can have those of several agents: `retrain/travel-desk-agent`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from flows.cron import NEXT, next_run, read_schedule
from flows.drift_check import drift_check
from flows.evaluate_snapshot import evaluate_snapshot
from flows.retrain import retrain
from flows.server import HEARTBEAT_SECONDS, HEARTBEAT_VARIABLE
from tasks.core.settings import read_params
from tasks.pipeline.cli_errors import TELEMETRY_OFF

JOB_ENVIRONMENT = {**TELEMETRY_OFF, HEARTBEAT_VARIABLE: HEARTBEAT_SECONDS}  # no library calls home
FLOWS: tuple[Flow[Any, Any], ...] = (retrain, drift_check, evaluate_snapshot)
REFUSED_BY_PREFECT = re.compile(r"[/%&<>]")  # in the name of a deployment or a work pool


@dataclass(frozen=True, slots=True)
class Deployment:
    """One flow under the model's name; without a `schedule` it runs when somebody or an event starts it."""

    flow: Flow[Any, Any]
    model: str
    schedule: CronSchedule | None

    @property
    def name(self) -> str:
        return REFUSED_BY_PREFECT.sub("-", self.model)

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"


def plan_deployments(cron: str | None, check_cron: str | None) -> list[Deployment]:
    """The three of this folder. ValueError for a schedule that is no cron expression."""
    model = str(read_params()["promote"]["model_name"])
    return [
        Deployment(retrain, model, read_schedule("--cron", cron)),
        Deployment(drift_check, model, read_schedule("--check-cron", check_cron)),
        Deployment(evaluate_snapshot, model, None),
    ]


def check_pool(name: str) -> None:
    """ValueError for a name that Prefect takes for no work pool."""
    if not name.strip() or REFUSED_BY_PREFECT.search(name):
        raise ValueError(
            f"--pool {name!r} cannot be the name of a work pool, so no worker would find it. Give it some letters, and "
            f"none of / % & < >."
        )


def register(planned: list[Deployment], *, pool: str, pool_type: str, folder: str) -> Iterator[str]:
    """Create or update the pool and the deployments; yields a line for each. A second time changes nothing."""
    with get_client(sync_client=True) as client:
        yield _register_pool(client, pool, pool_type)
        for deployment in planned:
            yield f"{deployment.full_name}: {_register(client, deployment, pool=pool, folder=folder)}"


def _register_pool(client: SyncPrefectClient, pool: str, pool_type: str) -> str:
    try:
        found = client.read_work_pool(pool)
    except ObjectNotFound:
        template = asyncio.run(get_default_base_job_template_for_infrastructure_type(pool_type)) or {}
        client.create_work_pool(WorkPoolCreate(name=pool, type=pool_type, base_job_template=template))
        return f"work pool {pool}: created"
    if found.type != pool_type:
        raise ValueError(
            f"the work pool {pool} is of type {found.type}, so its workers start no {pool_type} jobs. "
            f"Name another pool with --pool, or write --type {found.type}."
        )
    return f"work pool {pool}: unchanged"


def _register(client: SyncPrefectClient, deployment: Deployment, *, pool: str, folder: str) -> str:
    wanted = _describe(deployment, pool=pool, folder=folder)
    try:
        found = client.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        made = _create(client, deployment, wanted)
        schedule_runs(client, made)
        return f"created{_tell_schedule(client.read_deployment(made))}"
    _refuse_of_another_folder(found, deployment, folder)
    wanted["job_variables"] = _complete(found.job_variables or {})
    changed = [field for field, value in wanted.items() if getattr(found, field) != value]
    before = _folder_of(found, otherwise=folder)
    told = [f"folder: {before} → {folder}" if name == "pull_steps" and before != folder else name for name in changed]
    if changed:
        client.update_deployment(found.id, DeploymentUpdate(**wanted))
    if deployment.schedule and [item.schedule for item in found.schedules] != [deployment.schedule]:
        _replace_schedules(client, found, deployment.schedule)
        told.append("schedule")
        schedule_runs(client, found.id)
    did = f"updated ({', '.join(told)})" if told else "unchanged"
    return f"{did}{_tell_schedule(client.read_deployment(found.id))}"


def schedule_runs(client: SyncPrefectClient, deployment: UUID, since: datetime | None = None) -> None:
    """Create the runs of its active schedules from `since` (None: now) on. Prefect's scheduler does so only within a
    minute, from that moment on, and a run that was due before would never come. None where somebody paused the
    deployment: this request of the server, unlike its scheduler, does not look.
    """
    if client.read_deployment(deployment).paused:
        return
    body = {"start_time": (since or datetime.now(UTC)).isoformat()}
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=body)


def _describe(deployment: Deployment, *, pool: str, folder: str) -> dict[str, Any]:
    """What every `deploy` registers. The rest stays as people left it on the server's page."""
    file, function = Path(f"{deployment.flow.fn.__module__.replace('.', '/')}.py"), deployment.flow.fn.__name__
    return {
        "entrypoint": f"{file}:{function}",
        "pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": folder}}],
        "work_pool_name": pool,
        "enforce_parameter_schema": True,
        "parameter_openapi_schema": deployment.flow.parameters.model_dump(exclude_unset=True),
    }


def _create(client: SyncPrefectClient, deployment: Deployment, wanted: dict[str, Any]) -> UUID:
    return client.create_deployment(
        client.create_flow_from_name(deployment.flow.name),
        deployment.name,
        schedules=[DeploymentScheduleCreate(schedule=deployment.schedule)] if deployment.schedule else [],
        description=deployment.flow.description,
        job_variables=_complete({}),
        tags=[],
        **wanted,
    )


def _complete(job_variables: dict[str, Any]) -> dict[str, Any]:
    """With the variables of the environment that a job needs; what somebody set of them stays."""
    return {**job_variables, "env": {**JOB_ENVIRONMENT, **(job_variables.get("env") or {})}}


def _replace_schedules(client: SyncPrefectClient, found: DeploymentResponse, schedule: CronSchedule) -> None:
    """One that somebody paused stays paused."""
    is_active = not found.schedules or any(item.active for item in found.schedules)
    for item in found.schedules:
        client.delete_deployment_schedule(found.id, item.id)
    client.create_deployment_schedules(found.id, [(schedule, is_active)])


def _tell_schedule(found: DeploymentResponse) -> str:
    """When it runs next, after a comma; nothing where no schedule starts it."""
    if not found.schedules:
        return ""
    active = [item.schedule for item in found.schedules if item.active and not found.paused]
    if not active:
        return ", its schedule is paused"
    dates = []
    for schedule in active:
        if isinstance(schedule, CronSchedule):
            with suppress(ValueError):
                dates.append(next_run(schedule))
    return f", next run: {min(dates):{NEXT}}" if dates else ""


def _folder_of(found: DeploymentResponse, *, otherwise: str) -> str:
    steps = [next(iter(step.values())) for step in found.pull_steps or []]
    return next((str(step["directory"]) for step in steps if "directory" in step), otherwise)


def _refuse_of_another_folder(found: DeploymentResponse, deployment: Deployment, folder: str) -> None:
    """Two agents whose models have the same name would take each other's deployments. A folder that is gone moved."""
    other = _folder_of(found, otherwise=folder)
    if other != folder and (Path(other) / "params.yaml").exists():
        raise ValueError(
            f"{deployment.full_name} runs in {other}, and two folders cannot share it. Give this folder's model "
            f"another name (promote.model_name), or delete the deployment: prefect deployment delete "
            f"'{deployment.full_name}'."
        )
