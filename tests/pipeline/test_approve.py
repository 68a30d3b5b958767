"""Which waiting run `flows approve` takes a word for, and what one says whose decision was answered elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Suspended

from flows import approval, approve_command, events
from flows.approval import Question, close_answered_runs
from flows.approve_command import _find
from flows.sight import artifact_key
from flows.turn import workspace_name
from flows.verdict import end
from tasks.core.files import write_json
from tests.measurement.decisions import ROWS

LABELS: dict[str, Any] = Question(3, "2026-11-29T02:30", datetime(2026, 12, 1, tzinfo=UTC), "approval-1").to_labels()
FIRST, SECOND, THIRD = (
    FlowRun(id=UUID(number), flow_id=UUID(int=1), name=name, labels=LABELS)
    for number, name in (
        ("01a2b3c4-0000-4000-8000-000000000001", "agent 02:30"),
        ("01a2b3c4-9999-4000-8000-000000000002", "agent 03:30"),
        ("ffffffff-0000-4000-8000-000000000003", "01a2b3c4"),
    )
)


def found(monkeypatch: pytest.MonkeyPatch, wanted: str, *runs: FlowRun) -> FlowRun:
    monkeypatch.setattr(approve_command, "waiting_runs", lambda client: list(runs))
    client: Any = None
    return _find(client, wanted)


def test_a_run_is_found_by_its_id_its_name_or_the_first_characters_of_its_id(monkeypatch: pytest.MonkeyPatch):
    for wanted in (str(FIRST.id), "agent 02:30", "01a2b3c4-0"):
        assert found(monkeypatch, wanted, FIRST, SECOND) == FIRST
    assert found(monkeypatch, "01a2b3c4", FIRST) == FIRST
    assert found(monkeypatch, "01a2b3c4", FIRST, THIRD) == THIRD  # a whole name comes before a part of an id


@pytest.mark.parametrize(
    ("wanted", "told"), [("01a2b3c4", "2 waiting runs"), ("01a2b3c", "no waiting run"), ("", "no waiting run")]
)
def test_a_word_for_two_runs_or_too_short_a_one_answers_none(monkeypatch: pytest.MonkeyPatch, wanted: str, told: str):
    with pytest.raises(ValueError, match=f"{told} .*nothing was answered.*{FIRST.id}"):
        found(monkeypatch, wanted, FIRST, SECOND)


@pytest.mark.flow
@pytest.mark.parametrize("is_told", [False, True])
def test_a_run_whose_decision_was_approved_by_hand_says_so_everywhere_and_is_one_event(
    prefect_client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
):
    """`is_told`: the hand had PREFECT_API_URL. The model's name keeps the two cases apart on the server."""
    emitted: list[str] = []
    monkeypatch.setattr(events, "emit_event", lambda event, **row: emitted.append(event))
    monkeypatch.setattr(approval, "is_promotion_told", lambda *given: is_told)
    monkeypatch.chdir(tmp_path)
    model = f"shop-{is_told}"
    ended = end("Promoted", "version 3, approved by Jane")
    write_json(Path("artifacts/promote/decision.json"), {**ROWS["promote"], "is_champion": True})
    monkeypatch.setattr(approval, "settle", lambda question, params: ended)
    tags = ["profile: test", "waiting", f"workspace: {workspace_name(model, tmp_path)}"]
    run = prefect_client.create_flow_run(flow(lambda: None, name="asks"), tags=tags, state=Suspended())
    now = datetime.now(UTC).isoformat()
    prefect_client.update_flow_run_labels(run.id, {**LABELS, approval.DECIDED_AT: now})

    params = {"promote": {"model_name": model}, "paths": {"artifacts": "artifacts"}}
    close_answered_runs(params)
    close_answered_runs(params)  # the next flow finds nothing to close
    found = prefect_client.read_flow_run(run.id)
    assert found.state is not None and found.state.name == "Promoted"
    assert "promoted" in found.tags and "waiting" not in found.tags and "profile: test" in found.tags
    page = prefect_client.request(
        "GET", "/artifacts/{key}/latest", path_params={"key": artifact_key(model, "decision")}
    )
    assert page.json()["data"].startswith("# promote: iteration-0010 became champion")
    assert page.json()["flow_run_id"] == str(run.id)  # not of the flow that closed it
    assert emitted == ([] if is_told else ["turnwise.promoted"])
