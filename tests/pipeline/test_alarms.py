"""A flow that fails says so once, wherever it fails: nobody watches it at night. What it decides is an event too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed

from flows import events, one_run, retrain
from flows.drift_check import drift_check
from flows.evaluate_snapshot import evaluate_snapshot
from flows.verdict import WAITING, end
from tests.profiles import profile_text

FLOWS: dict[str, Callable[[], Any]] = {
    "retrain": retrain.retrain.fn,
    "drift-check": drift_check.fn,
    "evaluate-snapshot": lambda: evaluate_snapshot.fn("iteration-0040"),
}


@pytest.fixture
def alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What alarms flows raise, in a folder where each step does nothing, and a run waits for a person at its end."""
    found: list[tuple[str, str, str]] = []
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(one_run, "emit_alarm", lambda *alarm: found.append(alarm))
    for name in ("note_process", "close_dead_runs", "close_answered_runs"):
        monkeypatch.setattr(one_run, name, nothing)
    monkeypatch.setattr(one_run, "take_turn", lambda *given, **options: nullcontext())
    monkeypatch.setattr(one_run, "Stages", lambda *given, **options: nullcontext())
    monkeypatch.setattr(one_run, "closing", lambda stages: stages)
    for name in ("own_question", "add_tags"):
        monkeypatch.setattr(retrain, name, nothing)
    monkeypatch.setattr(retrain, "_run_for_a_reason", lambda *given, **options: Completed(name=WAITING))
    monkeypatch.setattr(retrain, "ask_a_person", lambda verdict, params: verdict)
    return found


def nothing(*given: Any, **options: Any) -> None:
    pass


def fail(*given: Any, **options: Any) -> Any:
    raise ValueError("it broke")


IN_TURN = ("note_process", "check_params", "take_turn", "close_dead_runs", "close_answered_runs", "Stages")
IN_RETRAIN = ("own_question", "read_params", "_run_for_a_reason", "ask_a_person")


@pytest.mark.parametrize(
    ("flow", "module", "step"),
    [(name, one_run, step) for name in FLOWS for step in IN_TURN]
    + [("retrain", retrain, step) for step in IN_RETRAIN],
)  # fmt: skip
def test_an_error_at_any_step_is_one_alarm(
    alarms: list[Any], monkeypatch: pytest.MonkeyPatch, flow: str, module: Any, step: str
):
    if flow == "retrain":
        FLOWS["retrain"]()
        assert alarms == []
    monkeypatch.setattr(module, step, fail)
    with pytest.raises(ValueError, match="it broke"):
        FLOWS[flow]()
    assert alarms == [("travel-desk-agent", "failed", "it broke")]


def test_so_is_an_answer_that_cannot_be_carried_out(alarms: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retrain, "own_question", lambda: "a question")
    monkeypatch.setattr(retrain, "take_answer", fail)
    with pytest.raises(ValueError, match="it broke"):
        FLOWS["retrain"]()
    assert alarms == [("travel-desk-agent", "failed", "it broke")]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [("num_traces:", "num_trace:", "num_trace"), ("seed:", "\n  : : [\nseed:", "params.yaml")],
)
@pytest.mark.parametrize("flow", FLOWS)
def test_so_is_a_mistake_in_params_yaml_under_the_name_of_the_deployment_where_it_has_none(
    alarms: list[Any], monkeypatch: pytest.MonkeyPatch, flow: str, before: str, after: str, told: str
):
    text = profile_text("test")
    assert before in text
    Path("params.yaml").write_text(text.replace(before, after, 1), encoding="utf-8")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__NAME", "travel-desk-agent")
    with pytest.raises(ValueError, match=told):
        FLOWS[flow]()
    ((model, kind, message),) = alarms
    assert (model, kind) == ("travel-desk-agent", "failed")
    assert told in message


@pytest.mark.parametrize(
    ("name", "event"),
    [("Promoted", "turnwise.promoted"), ("Held", "turnwise.held"), ("Rejected", "turnwise.held"), ("Declined", None),
     ("Waiting", None), ("Unchanged", None)],
)  # fmt: skip
def test_what_was_decided_is_one_event_with_the_champion(monkeypatch: pytest.MonkeyPatch, name: str, event: str | None):
    found: list[Any] = []
    monkeypatch.setattr(events, "emit_event", lambda event, **row: found.append((event, row)))
    events.emit_verdict("shop", end(name, "by 9 points"), 3)
    assert [given for given, _ in found] == ([event] if event else [])
    for _, row in found:
        assert row["resource"]["turnwise.version"] == row["payload"]["champion"] == "3"
        assert row["payload"]["message"] == f"{name.lower()}: by 9 points"
