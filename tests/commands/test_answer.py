"""A person's answer is in the report of the decision too, and never fails for the report."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import approval
from tasks.commands import answer
from tasks.commands import report as report_module
from tasks.core.files import write_json
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.journal import Entry, new_entry

DECISION, SHOWN = Path("artifacts/promote/decision.json"), Path("artifacts/report/decision.json")
APPROVE = ManualOverride("approve", "looked at it")


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a decision that waits, and an approval that changes the decision."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump({"paths": {"artifacts": "artifacts"}}), encoding="utf-8")
    for file in (DECISION, SHOWN):
        write_json(file, {"approval": "waiting"})

    def approve(override: ManualOverride, *, decided_at: str | None) -> list[str]:
        write_json(DECISION, {"approval": "given"})
        return ["became champion"]

    monkeypatch.setattr(answer, "approve", approve)
    monkeypatch.setattr(report_module, "build_report", lambda params: SHOWN.write_bytes(DECISION.read_bytes()))


@pytest.mark.usefixtures("waiting")
def test_the_report_of_a_decision_that_was_answered_is_built_again():
    assert answer.carry_out(APPROVE) == ["became champion"]
    assert '"given"' in SHOWN.read_text(encoding="utf-8")


@pytest.mark.usefixtures("waiting")
def test_an_answer_counts_also_where_the_report_cannot_be_built(monkeypatch: pytest.MonkeyPatch):
    def fail(params: dict[str, Any]) -> None:
        raise ValueError("another flow is at work in this folder.")

    monkeypatch.setattr(report_module, "build_report", fail)
    told = answer.carry_out(APPROVE)
    assert told[0] == "became champion"
    assert "another flow is at work" in told[1] and "`python -m tasks report`" in told[1]


@pytest.mark.usefixtures("waiting")
def test_without_a_report_none_is_built():
    SHOWN.unlink()
    assert answer.carry_out(APPROVE) == ["became champion"]
    assert not SHOWN.exists()


@pytest.mark.usefixtures("waiting")
def test_the_report_of_a_decision_that_nobody_answered_is_built_again(monkeypatch: pytest.MonkeyPatch):
    ending = new_entry("withdrawal", {"version": 2, "decided_at": "today", "reason": "nobody approved it"})
    monkeypatch.setattr(approval, "_registry", lambda params: None)
    monkeypatch.setattr(approval, "find_waiting", lambda registry: None)
    monkeypatch.setattr(approval, "ending_of", lambda registry, decided_at: ending)
    monkeypatch.setattr(approval, "get_run_logger", lambda: logging.getLogger(__name__))

    def write(params: dict[str, Any], ending: Entry) -> list[str]:
        write_json(DECISION, {"approval": "no"})
        return ["see the page"]

    monkeypatch.setattr(answer, "record_ending", write)
    state = approval.settle(approval.Question(2, "today", datetime.max.replace(tzinfo=UTC), "approval-1"), {})
    assert state is not None and state.message == "declined: version 2: nobody approved it"
    assert '"no"' in SHOWN.read_text(encoding="utf-8")
