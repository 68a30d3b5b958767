"""python -m flows approve: lists the runs that wait for a person, or answers one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus

from flows.approval import read_question, store_form, waiting_runs
from tasks.core.text import one_line
from tasks.stages.promote.approvals import name_of
from tasks.stages.promote.overrides import ManualOverride

SHORT_ID = 8  # characters, as other lines have an id
FORM_TRIES, NO_FORM = 10, "schema not found"  # Prefect stores the form a moment after the state


def list_waiting() -> Iterator[str]:
    with get_client(sync_client=True) as client:
        runs = waiting_runs(client)
    yield from (_describe(run) for run in runs)
    if not runs:
        yield "No run waits for approval."


def send_answer(wanted: str, override: ManualOverride) -> str:
    """Send the answer to the run of this id (or SHORT_ID characters of it) or name; a worker of its deployment does the
    rest.
    """
    word, verb = ("approve", "approve") if override.kind == "approve" else ("decline", "withdraw")
    by = name_of(override.by, verb)
    answer = {"answer": word, "by": by, "reason": override.reason}
    with get_client(sync_client=True) as client:
        run = _find(client, wanted)
        result = _resume(client, run, answer)
        if _has_no_form(result):  # its process was killed in between
            store_form(run)
            result = _resume(client, run, answer)
    if result.status != SetStateStatus.ACCEPT:
        reason = one_line(getattr(result.details, "reason", "") or "no reason given")
        raise ValueError(
            f"{run.name}: Prefect did not take the answer ({reason}). Look at the run on its page, or answer in its "
            f'workspace: python -m tasks promote --{verb} --reason "…".'
        )
    return f"{run.name} goes on with the answer of {by}: {word}. A worker of its deployment takes it up."


def _resume(client: SyncPrefectClient, run: FlowRun, answer: dict[str, str]) -> OrchestrationResult[Any]:
    for _ in range(FORM_TRIES):
        result = client.resume_flow_run(run.id, answer)
        if not _has_no_form(result):
            break
        time.sleep(1)
    return result


def _has_no_form(result: OrchestrationResult[Any]) -> bool:
    return result.status != SetStateStatus.ACCEPT and NO_FORM in str(result.details)


def _find(client: SyncPrefectClient, wanted: str) -> FlowRun:
    runs = waiting_runs(client)
    found = [run for run in runs if wanted in (str(run.id), run.name)]
    if not found and len(wanted) >= SHORT_ID:
        found = [run for run in runs if str(run.id).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} waiting runs have the id or name" if found else "no waiting run has the id or name"
    named = "; ".join(_describe(run) for run in runs) or "none waits"
    raise ValueError(f"{what} {wanted!r}, so nothing was answered. Give an id: {named}.")


def _describe(run: FlowRun) -> str:
    question = read_question(run)
    assert question is not None
    return f"{run.id}  {run.name}: version {question.version}, until {question.answer_by:%Y-%m-%d %H:%M} UTC"
