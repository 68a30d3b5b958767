"""Where conversations may come from, what is told of rows that cannot be read, and when nothing is written."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.harvest import labels
from tasks.commands.harvest.harvest import harvest
from tasks.core.files import read_records, write_jsonl
from tasks.core.records import Problem
from tasks.pipeline.run_lock import AnotherRun
from tests.commands.harvest.conftest import counts, says


def as_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "load_object", lambda path: lambda conversation: True)


def test_a_log_of_chats_is_taken_as_openai_writes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A file, with arguments as text and content in parts. What has no closing message or is asked in test is none."""
    as_checked(monkeypatch)
    call = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"item": "nuts"}'}}
    answered = [
        {"role": "system", "content": "You sell."},
        {"role": "user", "content": [{"type": "text", "text": "nuts?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "Three."},
    ]
    tool = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object", "properties": {}}}}
    log, out = Path("log.jsonl"), Path("out.jsonl")
    rows: list[dict[str, Any]] = [
        {"messages": answered, "tools": [tool], "model": "gpt"},
        {"messages": [*answered, *says("and figs?")]},
        {"messages": [*says("book flight 7"), {"role": "assistant", "content": "Done."}]},
        {"messages": answered[:3]},
    ]
    write_jsonl(log, rows)
    assert counts(harvest(log, out, checker="tasks.custom.shop:check"), capsys) == {
        "taken": 1,
        "left out: it has no closing message": 1,
        "left out: it is in test": 1,
        "left out: its row cannot be read": 1,
    }
    (problem,) = read_records(out, Problem)
    assert (problem.requests, [turn.answer for turn in problem.reference]) == (["nuts?"], ["Three."])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "hello"}', "line 1: at: Field required"),
        ('{"messages": [{"role": "user", "content": 7}]}', "line 1: messages.0.user.content"),
        ("hello", "line 1: "),
    ],
)
def test_where_no_row_can_be_read_the_first_ones_fault_and_the_form_are_told_and_nothing_is_written(
    folder: Path, line: str, fault: str
):
    Path("log.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"log\.jsonl") as told:
        harvest(Path("log.jsonl"), Path("out.jsonl"))
    assert fault in str(told.value) and '{"messages": […], "tools": […]}' in str(told.value)
    assert "\n" not in str(told.value) and not Path("out.jsonl").exists()


def test_no_file_is_written_without_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(labels, "load_object", lambda path: lambda conversation: False)
    harvest(folder, Path("out.jsonl"), checker="tasks.custom.shop:check")
    assert not Path("out.jsonl").exists()


def test_what_a_run_reads_is_not_written_while_it_is_at_work(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """All of tasks/ is its code; another place, `curate.source` too, takes problems at any time (decision 0110)."""
    as_checked(monkeypatch)
    with open("artifacts/.flow.lock", "w+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(os.getpid(), file=file, flush=True)
        with pytest.raises(AnotherRun, match=r"process \d+.*all of tasks/ counts as its code"):
            harvest(folder, Path("tasks/custom/served.jsonl"), checker="tasks.custom.shop:check")
        harvest(folder, Path("out.jsonl"), checker="tasks.custom.shop:check")
    assert not Path("tasks/custom/served.jsonl").exists() and Path("out.jsonl").exists()
    harvest(folder, Path("tasks/custom/served.jsonl"), checker="tasks.custom.shop:check")
