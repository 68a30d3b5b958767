"""One run at a time per workspace: Prefect's concurrency limit where several machines share a server, and the folder's
lock, which also sees runs that Prefect does not know.

On a server of our own the lock is enough: nobody else reaches that server, and the kernel frees a lock however its
process ends. A slot of a limit is only lent, and a server that restarts forgets to whom: one whose run has ended is
taken back here, and so is one of a run of this machine that was killed.
"""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import State
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.states import Running

from flows.labels import add_tags
from flows.prefect_runs import check_run_is_wanted, crash_dead_runs, own_run_id
from flows.processes import Guardian, only_flow
from flows.server import is_own_server
from tasks.pipeline.run_lock import AnotherRun
from tasks.pipeline.settings import PipelineSettings

LOOK_SECONDS = 5.0
LEASE_SECONDS = 300.0  # a dead machine's slot is free after this
FULL = 423
HERE = f"machine: {platform.node()}"


class Busy(Exception):
    """Another run is at work in this workspace, and `pipeline.on_busy` is `skip`."""


def workspace_name(model: str, folder: Path) -> str:
    """The name of the workspace's limit and tag: the model's, and a hash of the folder."""
    words = re.sub(r"[^\w.]+", "-", model).strip("-")
    return f"{words}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


@contextmanager
def take_turn(artifacts: Path, settings: PipelineSettings, *, model: str) -> Iterator[Guardian]:
    """Hold the workspace for one run; yields the guardian of its children. Waits, or raises Busy, as on_busy says."""
    workspace = workspace_name(model, Path.cwd())
    add_tags(f"workspace: {workspace}", HERE)
    with ExitStack() as held:
        is_told = False
        while True:
            try:
                guardian = _take(held, artifacts, workspace)
                break
            except Busy as busy:
                if settings.on_busy == "skip":
                    raise
                if not is_told:
                    _show_waiting(str(busy))
                is_told = True
            time.sleep(LOOK_SECONDS)
            check_run_is_wanted("this run")
        if is_told:
            _show(Running())
        yield guardian


def _take(held: ExitStack, artifacts: Path, workspace: str) -> Guardian:
    with ExitStack() as taken:
        try:
            guardian = taken.enter_context(only_flow(artifacts))
        except AnotherRun as error:
            raise Busy(error.found) from None
        if not is_own_server():
            _take_slot(taken, workspace)
        held.push(taken.pop_all())
    return guardian


def _take_slot(taken: ExitStack, workspace: str) -> None:
    """Take the workspace's only slot; Busy where another run has it. The caller has the folder's lock. Whether the slot
    is free is asked first: a refused one is an error in Prefect's log.
    """
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(workspace, limit=1)
        is_taken = bool(client.read_global_concurrency_limit_by_name(workspace).active_slots)
        other = _find_holder(client, workspace)
        if is_taken:
            if other is not None:
                raise Busy(f"the run {other} is at work in this workspace ({workspace})")
            client.update_global_concurrency_limit(workspace, GlobalConcurrencyLimitUpdate(active_slots=0))
    try:
        taken.enter_context(_lease(workspace))
    except ConcurrencySlotAcquisitionError as error:
        if not _is_full(error):
            raise
        raise Busy(f"another run began in this moment in this workspace ({workspace})") from None


@contextmanager
def _lease(workspace: str) -> Iterator[None]:
    """A server that is away for a while does not end the run, which the folder's lock still protects. One that is away
    at the end cannot take the slot back, which then ends with its lease.
    """
    lease = concurrency(
        workspace, 1, max_retries=0, lease_duration=LEASE_SECONDS, strict=True, raise_on_lease_renewal_failure=False
    )
    lease.__enter__()
    try:
        yield
    finally:
        with suppress(httpx.TransportError):
            lease.__exit__(None, None, None)


def _is_full(error: ConcurrencySlotAcquisitionError) -> bool:
    cause = error.__cause__
    return isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == FULL


def _find_holder(client: SyncPrefectClient, workspace: str) -> str | None:
    """The name of a run of another machine that is at work in the workspace. Of this machine the dead are closed, and
    the living wait, since we have the lock.
    """
    others = crash_dead_runs(client, f"workspace: {workspace}")
    return next((run.name for run in others if HERE not in run.tags), None)


def _show_waiting(reason: str) -> None:
    _show(Running(name="Waiting for its turn", message=reason))


def _show(state: State[None]) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(own_run_id(), state, force=True)
