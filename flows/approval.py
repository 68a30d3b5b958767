"""A decision that waits for a person: the run suspends itself and holds nothing, and goes on with the answer.

Suspended, and not paused: the process ends, so that the folder's lock, the limit's slot and the worker are free, and a
worker that is killed meanwhile loses nothing. What the run waits for is in its labels. The answer is the typed input of
Prefect's page or of `python -m flows approve`; any worker of the deployment takes the run up and does what
`python -m tasks promote --approve` or `--withdraw` would. Only the run of a deployment can be taken up again, so one of
`python -m flows run` ends as Waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn
from uuid import uuid4

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput, keyset_from_paused_state, read_flow_run_input
from prefect.states import Suspended
from pydantic import Field

from flows.events import emit_verdict, is_promotion_told
from flows.prefect_runs import PROCESS_LABEL, own_run_id
from flows.sight import artifact_key, escape, show_decision
from flows.turn import workspace_name
from flows.verdict import WAITING, end
from tasks.commands.answer import carry_out, write_ending
from tasks.core.settings import load, load_paths
from tasks.pipeline.settings import PipelineSections
from tasks.stages.promote.approvals import ApprovalSections
from tasks.stages.promote.overrides import ANSWER_HOURS, ManualOverride, read_override
from tasks.tracking.aliases import open_registry
from tasks.tracking.journal import MAX_REASON
from tasks.tracking.registry import Registry
from tasks.tracking.waiting import ending_of, find_waiting, withdraw_unanswered

VERSION, DECIDED_AT = "turnwise.version", "turnwise.decided_at"
ANSWER_BY, ASKED_AS = "turnwise.answer_by", "turnwise.asked_as"
DECLINED = "Declined"
HAS_TEXT = r"\S"
QUESTION = """**{told}**

[The decision](/artifacts/key/{key}): every check, with its numbers. Without an answer by {until:%Y-%m-%d %H:%M} UTC it
is declined. What is written here is in the record for good."""


class Answer(RunInput):
    """What Prefect's form asks for."""

    answer: Literal["approve", "decline"] = Field(description="approve: the version becomes champion.")
    by: str = Field(pattern=HAS_TEXT, max_length=MAX_REASON, description="Your name.")
    reason: str = Field(pattern=HAS_TEXT, max_length=MAX_REASON, description="Why; it stays with the model.")

    def to_override(self) -> ManualOverride:
        is_yes = self.answer == "approve"
        override = read_override(force=False, approve=is_yes, withdraw=not is_yes, reason=self.reason, by=self.by)
        assert override is not None
        return override


@dataclass(frozen=True, slots=True)
class Question:
    """The decision that a run waits for, from the run's labels. `asked_as` is the key of the answer: another each time
    it is asked, so that a run that is retried gets no answer to an older question.
    """

    version: int
    decided_at: str
    answer_by: datetime
    asked_as: str

    def to_labels(self) -> dict[str, Any]:
        when = {DECIDED_AT: self.decided_at, ANSWER_BY: self.answer_by.isoformat()}
        return {VERSION: self.version, **when, ASKED_AS: self.asked_as}

    def is_overdue(self) -> bool:
        return datetime.now(UTC) >= self.answer_by


def read_question(run: FlowRun) -> Question | None:
    """None where the run waits for nothing."""
    labels = run.labels
    if not labels.get(DECIDED_AT):
        return None
    answer_by = datetime.fromisoformat(str(labels[ANSWER_BY]))
    return Question(int(labels[VERSION]), str(labels[DECIDED_AT]), answer_by, str(labels[ASKED_AS]))


def own_question() -> Question | None:
    """Of this run, where it was suspended before."""
    with get_client(sync_client=True) as client:
        return read_question(client.read_flow_run(own_run_id()))


def ask_a_person(verdict: State[None], params: dict[str, Any]) -> State[None]:
    """Suspend the run, which ends this process; the verdict where it cannot be taken up again. Call it without the
    folder's lock.
    """
    waiting, limit = find_waiting(_registry(params)), answer_limit(params)
    if limit and waiting is not None:
        until = min(waiting.expires, datetime.now(UTC) + timedelta(hours=float(limit[ANSWER_HOURS])))
        _ask(Question(waiting.version, waiting.decided_at, until, _new_key()), str(verdict.message), params)
    return verdict


def answer_limit(params: dict[str, Any]) -> dict[str, str]:
    """The variable that gives promote's decision the end that this run's question has; empty where none is asked."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    if context.flow_run.deployment_id is None:
        return {}
    return {ANSWER_HOURS: str(load(PipelineSections, params).pipeline.approval_timeout_hours)}


def take_answer(question: Question, params: dict[str, Any]) -> State[None]:
    """Do what the person said, in a run that was taken up again; declined where that was too late. A run that was
    started again without an answer, such as one that was killed before it had asked, asks again.
    """
    ended = settle(question, params)
    if ended is None:
        answer = _read_answer(question)
        if answer is None:
            told = f"waiting: for a person's approval of version {question.version}"
            _ask(replace(question, asked_as=_new_key()), told, params)
        _carry_out(answer, question)
        ended = settle(question, params)
    assert ended is not None
    with get_client(sync_client=True) as client:
        _tell_ending(client, client.read_flow_run(own_run_id()), question, ended, params)
        client.update_flow_run_labels(own_run_id(), {DECIDED_AT: ""})  # a later retry is a run like any other
    return ended


def settle(question: Question, params: dict[str, Any]) -> State[None] | None:
    """How the decision ended, None while it waits. It ends here, declined, where nobody answered in time."""
    registry = _registry(params)
    if question.is_overdue():
        withdraw_unanswered(registry, question.decided_at, question.answer_by)
    waiting = find_waiting(registry)
    if waiting is not None and waiting.decided_at == question.decided_at:
        return None
    entry = ending_of(registry, question.decided_at)
    told = f"version {question.version}"
    if entry is None:
        return end(DECLINED, f"{told}: another decision was made since")
    for line in write_ending(entry):
        get_run_logger().info(line)
    if entry.kind == "approval":
        return end("Promoted", f"{told}, approved by {entry.by}: {entry.body['reason']}")
    by = f", by {entry.by}" if entry.body.get("override") else ""
    return end(DECLINED, f"{told}{by}: {entry.body['reason']}")


def close_answered_runs(params: dict[str, Any]) -> None:
    """End the suspended runs of this workspace whose decision was made otherwise, such as by `python -m tasks promote
    --approve`, or in time by nobody.
    """
    model = params["promote"]["model_name"]
    with get_client(sync_client=True) as client:
        for run in waiting_runs(client, f"workspace: {workspace_name(model, Path.cwd())}"):
            question = read_question(run)
            ended = None if question is None else settle(question, params)
            if question is not None and ended is not None:
                _tell_ending(client, run, question, ended, params)
                client.set_flow_run_state(run.id, ended, force=True)


def _tell_ending(
    client: SyncPrefectClient, run: FlowRun, question: Question, ended: State[None], params: dict[str, Any]
) -> None:
    """Where the run said that its decision waits, in its tags and in the decision on its page; and to automations."""
    model = params["promote"]["model_name"]
    tags = [tag for tag in run.tags if tag != WAITING.lower()]
    client.update_flow_run(run.id, tags=list(dict.fromkeys([*tags, str(ended.name).lower()])))
    show_decision(model, load_paths(params), run_id=run.id)
    if not is_promotion_told(client, model, question.version, question.decided_at):
        emit_verdict(model, ended, question.version)


def waiting_runs(client: SyncPrefectClient, *tags: str) -> list[FlowRun]:
    """The runs that wait for an answer, the newest first."""
    is_paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    wanted = FlowRunFilter(state=is_paused, tags=FlowRunFilterTags(all_=list(tags)) if tags else None)
    runs = [run for run in client.read_flow_runs(flow_run_filter=wanted) if read_question(run)]
    return sorted(runs, key=lambda run: str(run.expected_start_time), reverse=True)


def store_form(run: FlowRun) -> None:
    """For a suspended run that was killed before Prefect had stored it."""
    assert run.state is not None
    Answer.save(keyset_from_paused_state(run.state), flow_run_id=run.id)


def _new_key() -> str:
    return f"approval-{uuid4().hex}"


def _ask(question: Question, told: str, params: dict[str, Any]) -> NoReturn:
    """Suspend this run, which ends its process; another one takes it up."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(own_run_id(), {**question.to_labels(), PROCESS_LABEL: ""})
    get_run_logger().info(f'{told}. Answer it: python -m flows approve {own_run_id()} --reason "…"')
    key = artifact_key(params["promote"]["model_name"], "decision")
    text = QUESTION.format(told=escape(told), key=key, until=question.answer_by)
    suspend_flow_run(wait_for_input=Answer.with_initial_data(description=text), key=question.asked_as)
    raise AssertionError("Prefect has this question as asked already")


def _read_answer(question: Question) -> Answer | None:
    """Read and not waited for: where the run failed to carry it out, a retry finds it again."""
    keys = keyset_from_paused_state(Suspended(pause_key=question.asked_as))
    row = read_flow_run_input(keys["response"])
    return Answer(**row) if row else None


def _carry_out(answer: Answer, question: Question) -> None:
    for line in carry_out(answer.to_override(), decided_at=question.decided_at):
        get_run_logger().info(line)


def _registry(params: dict[str, Any]) -> Registry:
    settings = load(ApprovalSections, params)
    return open_registry(settings.tracking, settings.promote.model_name)
