"""A champion that a person made is an event too, with which automations reload a server; a flow emits its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands import prefect_events
from tasks.commands.cli import stages
from tasks.core.files import write_json
from tasks.pipeline.run_lock import FLOW_VARIABLE

EVENT = ["promoted", "shop", "3", "promoted: version 3 (iteration-0040), by hand"]


@pytest.fixture
def emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is emitted in a folder whose last promotion was forced."""
    found: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        assert command[1:3] == ["-m", "flows.events"]
        found.append(command[3:])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.delenv(FLOW_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(stages, "_run", lambda *given, **options: ["promote: results are in artifacts/promote"])
    Path("params.yaml").write_text(yaml.safe_dump({"paths": {"artifacts": "artifacts"}}), encoding="utf-8")
    write_outcome("promote")
    return found


def write_outcome(decision: str) -> None:
    row = {"decision": decision, "registered_model": "shop", "registered_version": 3, "snapshot": "iteration-0040"}
    write_json(Path("artifacts/promote/outcome.json"), row)


def promote(**options: Any) -> Any:
    return stages.promote(
        approve=False, withdraw=False, by=None, debug=False, **{"force": False, "reason": None, **options}
    )


def test_a_promotion_by_hand_is_one_event_forced_or_not(emitted: list[list[str]]):
    promote(force=True, reason="x")
    promote()
    assert emitted == [EVENT, EVENT]


def test_what_made_no_champion_is_none(emitted: list[list[str]]):
    write_outcome("hold")
    promote()
    assert emitted == []


def test_a_flows_child_leaves_the_event_to_the_flow(emitted: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FLOW_VARIABLE, "token")
    promote()
    prefect_events.tell_approval("promote: 3")
    assert emitted == []


def test_without_a_server_none_is_told(emitted: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_API_URL")
    promote()
    prefect_events.tell_approval("promote: 3")
    assert emitted == []


def test_a_server_that_is_away_costs_a_warning_and_no_promotion(
    emitted: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*given: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("flows.events", 60)

    monkeypatch.setattr(subprocess, "run", fail)
    promote()
    assert "PREFECT_API_URL" in capsys.readouterr().err
