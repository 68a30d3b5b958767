"""Stop a flow that Prefect no longer runs, and close runs that died.

Without its server Prefect goes on: stages would run and promote, and nobody would see it. After `kill -9` or a power
cut it shows a run as running for ever. So each run notes its process in a label, and one whose process is gone is
closed; others may be waiting for their turn.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.connection import REFUSED
from flows.mlflow_runs import tracking_settings
from flows.server import is_own_server, is_own_server_dead
from tasks.core.passing_faults import PassingFault
from tasks.core.processes import is_noted_gone, this_process
from tasks.core.settings import load_paths, read_params
from tasks.pipeline.run_lock import SERVE, AnotherRun, look_for_owner, only_run
from tasks.tracking.runs import close_ended_runs, close_killed_runs

AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
PROCESS_LABEL = "turnwise.process"  # of a run that is at work
# Pauses before a server is asked again: the user's (Prefect's client itself waits a minute for one that restarts), one
# that answers 500 (its database may be restarting), and our own, which may be busy.
PATIENCE_SECONDS: tuple[float, ...] = (1.0,)
FAILING_PATIENCE_SECONDS: tuple[float, ...] = (1.0, 3.0, 6.0, 20.0, 30.0)
OWN_PATIENCE_SECONDS: tuple[float, ...] = (0.5, 1.0, 2.0)
GONE = "Its process was gone when the next began. The next run goes on from the last checkpoint."


def own_run_id() -> UUID:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.id


def note_process() -> None:
    """Note in this run's labels which process it is."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(own_run_id(), {PROCESS_LABEL: json.dumps(this_process())})


def check_run_is_wanted(stage: str) -> None:
    """Call it before each stage. ValueError where Prefect does not show this run as running, or cannot be asked."""
    if stop := _reason_to_stop():
        raise (PassingFault if stop.may_pass else ValueError)(
            f"{stop.reason}, so {stage} and what follows do not run: nobody would see their results. "
            f"Put that right and run again: finished stages are not repeated."
        )


class _Stop(NamedTuple):
    reason: str
    may_pass: bool = False  # by itself


def _reason_to_stop() -> _Stop | None:
    server = f"Prefect's server ({os.environ.get('PREFECT_API_URL', 'unknown')})"
    num_asked = 0
    while True:
        patience = OWN_PATIENCE_SECONDS if is_own_server() else PATIENCE_SECONDS
        try:
            state = _read_state(own_run_id())
            return None if state.is_running() else _Stop(f"Prefect shows this run as {state.name}, not as running")
        except ObjectNotFound:
            return _Stop(f"{server} does not know this run: somebody deleted it, or moved the server's database")
        except httpx.HTTPStatusError as error:
            if error.response.status_code in REFUSED:
                return _Stop(f"{server} refuses the password of this run, which is PREFECT_API_AUTH_STRING")
            fault, patience = f"status {error.response.status_code}", FAILING_PATIENCE_SECONDS
        except (httpx.HTTPError, OSError) as error:
            fault = type(error).__name__
        if is_own_server_dead():
            return _Stop(f"{server} is gone")
        if num_asked >= len(patience):
            return _Stop(f"{server} does not answer ({fault})", may_pass=True)
        time.sleep(patience[num_asked])
        num_asked += 1


def _read_state(run_id: UUID) -> State:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    assert state is not None  # a run that started has one
    return state


def close_dead_runs(params: dict[str, Any]) -> None:
    """On our own server: mark dead runs as Crashed; `turn.py` does it on another. There: close in MLflow what Prefect
    shows as ended, such as a run of a machine that is gone. The caller has the folder's lock, so only runs of a `serve`
    can be waiting; where none is at work, this run is the only one.
    """
    if not is_own_server():
        close_ended_runs(tracking_settings(params), _find_ended)
        return
    with get_client(sync_client=True) as client, look_for_owner(load_paths(params).artifacts, SERVE) as is_serving:
        crash_dead_runs(client, is_only=not is_serving, own=own_run_id())


def _find_ended(run_ids: set[str]) -> set[str]:
    ids = []
    for run_id in run_ids:
        with suppress(ValueError):  # anybody can edit a tag
            ids.append(UUID(run_id))
    wanted = FlowRunFilter(
        id=FlowRunFilterId(any_=ids),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES))),
    )
    with get_client(sync_client=True) as client:
        return {str(run.id) for run in client.read_flow_runs(flow_run_filter=wanted)}


def prepare_schedule() -> None:
    """On our own server: remove the schedules that an earlier `serve` left, with the runs that the clock planned. A
    deployment stays: a run that a person started or answered would be lost with it. Close dead runs in Prefect and
    MLflow, unless a flow started by hand is running in the folder.
    """
    params = read_params()
    with get_client(sync_client=True) as client, ExitStack() as stack:
        for deployment in client.read_deployments():
            for schedule in deployment.schedules:
                client.delete_deployment_schedule(deployment.id, schedule.id)
        try:
            stack.enter_context(only_run(load_paths(params).artifacts))
        except AnotherRun:
            return
        crash_dead_runs(client, is_only=True)
        close_killed_runs(tracking_settings(params))


def crash_dead_runs(
    client: SyncPrefectClient, *tags: str, is_only: bool = False, own: UUID | None = None
) -> list[FlowRun]:
    """Mark as Crashed the runs at work with these tags whose process is gone; returns the others. With `is_only` none
    but `own` can be alive, so all others are dead, also those of a container that nobody can look into.
    """
    states = [*AT_WORK, StateType.PENDING] if is_only else AT_WORK
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=states)),
        tags=FlowRunFilterTags(all_=list(tags)) if tags else None,
    )
    others = []
    for run in client.read_flow_runs(flow_run_filter=wanted):
        if run.id != own and (is_only or is_noted_gone(str(run.labels.get(PROCESS_LABEL) or ""))):
            client.set_flow_run_state(run.id, Crashed(message=GONE), force=True)
        else:
            others.append(run)
    return others
