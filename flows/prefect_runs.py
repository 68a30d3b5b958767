"""What Prefect believes of a run and what is so: a flow nobody follows any more stops, and a dead one is closed.

Prefect goes on without its server: stages would run, and promote, for nobody. And it believes that a run is at work
until somebody says that it ended, which a `kill -9`, or a machine that was switched off, does not. Dead runs are closed
only on a server of this folder's own (`server.py`): in a database that several folders share they may be another's.
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

from flows.journal import tracking_settings
from flows.server import is_own_server
from tasks.folder_lock import only_run
from tasks.settings import load_paths, read_params
from tasks.tracking.runs import close_killed_runs

AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PATIENCE_SECONDS = (1, 5, 25)  # with a server of somebody's: it may just be restarting


def own_run_id() -> UUID:
    """The run this process is."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.id


def check_run_is_wanted(stage: str) -> None:
    """Before `stage`: ValueError where Prefect's server is gone, or has this run as anything but running."""
    patience = [] if is_own_server() else list(PATIENCE_SECONDS)
    while (state := _state_of(own_run_id())) is None and patience:
        time.sleep(patience.pop(0))
    if state is None:
        raise ValueError(
            f"Prefect's server ({os.environ.get('PREFECT_API_URL', 'unknown')}) does not answer, so {stage} and what "
            f"follows do not run: nobody would see what they did. Start the server, then run again: finished stages "
            f"are not repeated."
        )
    if not state.is_running():
        raise ValueError(
            f"Prefect has this run as {state.name}, not as running, so {stage} and what follows do not run. "
            f"Run again if that is not what you meant: finished stages are not repeated."
        )


def _state_of(run_id: UUID) -> State | None:
    """None where nobody answers, or somebody who does not know the run."""
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(run_id).state
    except (httpx.HTTPError, ObjectNotFound, OSError):
        return None


def close_dead_runs() -> None:
    """Mark what died in this folder as Crashed. The caller holds the folder's lock, so only its own run is at work."""
    if is_own_server():
        with get_client(sync_client=True) as client:
            _crash_runs(client, but=own_run_id())


def prepare_schedule(deployment: str) -> None:
    """On a server of our own: the old schedule goes, with its runs to come and those overdue; runs that died are closed
    in Prefect and MLflow, unless a flow started by hand is at work in the folder.
    """
    params = read_params()
    with get_client(sync_client=True) as client, ExitStack() as stack:
        with suppress(ObjectNotFound):  # with it go its schedules, and its limit, whose slot a dead run may still take
            client.delete_deployment(client.read_deployment_by_name(deployment).id)
        try:
            stack.enter_context(only_run(load_paths(params).artifacts))
        except ValueError:
            return
        _crash_runs(client, but=None)
        close_killed_runs(tracking_settings(params))


def _crash_runs(client: SyncPrefectClient, *, but: UUID | None) -> None:
    at_work = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=AT_WORK)))
    for run in client.read_flow_runs(flow_run_filter=at_work):
        if run.id != but:
            client.set_flow_run_state(run.id, Crashed(message="Its process was gone when the next began."), force=True)
