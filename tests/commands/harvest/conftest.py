"""Recorded conversations of each fate, and curated splits that have two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.console import SafeConsole
from tasks.core.files import write_jsonl
from tests import tiny
from tests.profiles import profile_params

CALL = {"id": "call_1", "type": "function", "function": {"name": "stock", "arguments": {"item": "tea"}}}
HIDDEN_CALL = CALL | {"function": {"name": "stock", "arguments": {"item": ["[redacted]"]}}}


def row(
    number: int, messages: list[dict[str, Any]], text: str, *, name: str, calls: Any = (), finish: str = "stop"
) -> dict[str, Any]:
    reply = {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}
    return {
        "at": "2026-01-01T00:00:00", "conversation": name * 24, "number": number, "version": "shop/3", "tools": [],
        "messages": messages, "reply": reply, "finish": finish, "num_prompt_tokens": 9, "num_written_tokens": 4,
    }  # fmt: skip


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations of each fate, and curated splits with two of them."""
    monkeypatch.chdir(tmp_path)
    params = profile_params("demo")
    params["curate"]["source"] = "not_yet.jsonl"
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    template = tiny.problems(1)[0]
    for split, request in (("train", "Known to train"), ("select", "x"), ("test", "book  FLIGHT 7")):
        given = template.model_copy(update={"requests": [request, "and then"] if split == "test" else [request]})
        write_jsonl(tmp_path / "artifacts" / "curate" / f"{split}.jsonl", [given.model_dump()])
    write_jsonl(
        tmp_path / "served" / "conversations.jsonl",
        [
            row(0, says("is there tea?"), "", name="a", calls=[CALL], finish="tool_calls"),
            row(0, says("hello"), "Hello.", name="b"),
            row(1, [{"role": "tool", "tool_call_id": "call_1", "content": "3"}], "Three.", name="a"),
            row(2, says("and sugar?"), "None.", name="a"),
            row(0, says("  HELLO "), "Hi.", name="c"),
            row(0, says("Book flight 7"), "Done.", name="d"),
            row(0, says("good morning"), "Hello.", name="6"),
            row(1, says("book flight  7"), "Done.", name="6"),
            row(0, [*says("good morning"), *says("And THEN")], "Done.", name="7"),
            row(0, says("known to train"), "Done.", name="e"),
            row(0, says("bad luck"), "Sorry.", name="f"),
            row(0, says("maybe so"), "Perhaps.", name="0"),
            row(0, says("write to [redacted]"), "Done.", name="1"),
            row(0, says("my number?"), "It is [redacted].", name="4"),
            row(0, says("order tea"), "", name="5", calls=[HIDDEN_CALL], finish="tool_calls"),
            row(1, [{"role": "tool", "tool_call_id": "call_1", "content": "3"}], "Done.", name="5"),
            row(0, says("long"), "It goes o", name="2", finish="length"),
            row(1, says("what was before?"), "Nothing.", name="3"),
            row(0, says("how do I get there?"), "Take the tram to the cent", name="8", finish="length"),
            row(1, says("thanks"), "You are welcome.", name="8"),
            row(0, says("coffee?"), "", name="9", calls=[CALL], finish="tool_calls"),
        ],
    )
    with (tmp_path / "served" / "conversations.jsonl").open("a") as file:
        file.write('{"at": "20')
    return tmp_path / "served"


def counts(table: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    SafeConsole(width=120).print(table)
    lines = [line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines()[2:] if line.strip()]
    return {name.strip(): int(count) for name, count in lines}
