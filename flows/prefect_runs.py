"""Stop a flow that Prefect no longer runs, and close runs that died.

Without its server Prefect goes on: stages would run and promote, and nobody would see it. After `kill -9` or a power
cut it shows a run as running for ever. Dead runs are closed only on this folder's own server (`server.py`): a shared
database may contain the runs of other folders.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.mlflow_runs import tracking_settings
from flows.server import is_own_server, is_own_server_dead
from tasks.core.settings import load_paths, read_params
from tasks.pipeline.run_lock import AnotherRun, only_run
from tasks.tracking.runs import close_killed_runs

AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PATIENCE_SECONDS = (1.0, 5.0, 25.0)  # with a server of the user's, which may just be restarting
OWN_PATIENCE_SECONDS = (0.5, 1.0, 2.0)  # with our own server, which may be busy
REFUSED = (401, 403)


def own_run_id() -> UUID:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.id


def check_run_is_wanted(stage: str) -> None:
    """Call it before each stage. ValueError where Prefect does not show this run as running, or cannot be asked."""
    if reason := _reason_to_stop():
        raise ValueError(
            f"{reason}, so {stage} and what follows do not run: nobody would see their results. "
            f"Put that right and run again: finished stages are not repeated."
        )


def _reason_to_stop() -> str | None:
    server = f"Prefect's server ({os.environ.get('PREFECT_API_URL', 'unknown')})"
    patience = list(OWN_PATIENCE_SECONDS if is_own_server() else PATIENCE_SECONDS)
    while True:
        try:
            state = _read_state(own_run_id())
            return None if state.is_running() else f"Prefect shows this run as {state.name}, not as running"
        except ObjectNotFound:
            return f"{server} does not know this run: somebody deleted it, or moved the server's database"
        except httpx.HTTPStatusError as error:
            if error.response.status_code in REFUSED:
                return f"{server} refuses the password of this run, which is PREFECT_API_AUTH_STRING"
            fault = f"status {error.response.status_code}"
        except (httpx.HTTPError, OSError) as error:
            fault = type(error).__name__
        if is_own_server_dead():
            return f"{server} is gone"
        if not patience:
            return f"{server} does not answer ({fault})"
        time.sleep(patience.pop(0))


def _read_state(run_id: UUID) -> State:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    assert state is not None  # a run that started has one
    return state


def close_dead_runs() -> None:
    """Mark dead runs of this folder as Crashed. The caller has the folder's lock, so every other run is dead."""
    if is_own_server():
        with get_client(sync_client=True) as client:
            _crash_runs(client, but=own_run_id())


def prepare_schedule(deployment: str) -> None:
    """On our own server: delete the schedule that an earlier `serve` left, with its planned runs. Close dead runs in
    Prefect and MLflow, unless a flow started by hand is running in the folder.
    """
    params = read_params()
    with get_client(sync_client=True) as client, ExitStack() as stack:
        with suppress(ObjectNotFound):  # also deletes its schedules and its limit, whose slot a dead run may still take
            client.delete_deployment(client.read_deployment_by_name(deployment).id)
        try:
            stack.enter_context(only_run(load_paths(params).artifacts))
        except AnotherRun:
            return
        _crash_runs(client, but=None)
        close_killed_runs(tracking_settings(params))


def _crash_runs(client: SyncPrefectClient, *, but: UUID | None) -> None:
    at_work = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=AT_WORK)))
    for run in client.read_flow_runs(flow_run_filter=at_work):
        if run.id != but:
            client.set_flow_run_state(run.id, Crashed(message="Its process was gone when the next began."), force=True)
