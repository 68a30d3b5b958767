"""Which of the waiting runs `flows approve` takes a word for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun

from flows import approve_command
from flows.approval import Question
from flows.approve_command import _find

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
