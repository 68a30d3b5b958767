"""What is written of served conversations: a row for each reply, redacted, whole, and joined by what was said."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.serve.recorder import Recorder
from tasks.gateway.completions import Completion, CompletionRequest, WrittenCall
from tests.commands.serve.clients import user
from tests.commands.serve.conftest import SETTINGS

KEY = "k-1234-5678"
CALL = WrittenCall("call_1", "look_up", {"mail": "ann@shop.com", "card": 4_111})


class Parrot:
    """A Backend that says one thing, or calls `look_up` where it is asked to look."""

    def models(self, key: str) -> list[str]:
        return ["parrot"]

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        calls = [CALL] if request.messages[-1]["content"].startswith("look") else []
        answer: Future[Completion] = Future()
        answer.set_result(
            Completion(
                id="1", model="parrot", text="" if calls else "It is fine.", calls=calls,
                finish="tool_calls" if calls else "stop", num_prompt_tokens=3, num_cached_tokens=0,
                token_ids=[1, 2], logp=[-0.5, -0.5], version="parrot/1", thought="hm",
            )
        )  # fmt: skip
        return answer


def record(folder: Path, *histories: list[dict[str, Any]]) -> list[dict[str, Any]]:
    recorder = Recorder(Parrot(), folder, SETTINGS.record, secret_values=[KEY])
    for messages in histories:
        recorder.complete(KEY, CompletionRequest("parrot", messages)).result()
    recorder.close()
    return rows(folder / "conversations.jsonl")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_rows_of_one_conversation_are_joined_by_what_was_said_and_hide_what_they_must(tmp_path: Path):
    opening = [user(f"look for bob@shop.com with {KEY}")]
    # The client writes the call anew: other ids, no thought, null for the empty message.
    calls = [{"id": "x", "type": "function", "function": {"name": "look_up", "arguments": dict(CALL.arguments)}}]
    answered: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "here"},
    ]

    first, other, second = record(tmp_path / "r", opening, [user("hello")], [*opening, *answered])

    assert first["messages"] == [user("look for [redacted] with [redacted]")]
    assert first["reply"]["tool_calls"][0]["function"]["arguments"] == {"mail": "[redacted]", "card": 4_111}
    assert first["reply"]["thought"] == "hm"
    assert (second["conversation"], second["number"]) == (first["conversation"], 1)
    assert [message["role"] for message in second["messages"]] == ["tool"]  # what the row before has is not repeated
    assert (other["number"], other["version"]) == (0, "parrot/1") and other["conversation"] != first["conversation"]
    assert (
        (tmp_path / "r").stat().st_mode & 0o077 == 0 == (tmp_path / "r" / "conversations.jsonl").stat().st_mode & 0o077
    )


def test_two_that_go_on_from_one_history_are_two_conversations(tmp_path: Path):
    said = [user("hello"), {"role": "assistant", "content": "It is fine."}]
    first, *others = record(tmp_path, [user("hello")], [*said, user("and?")], [*said, user("so?")])

    assert [row["conversation"] == first["conversation"] for row in others] == [True, False]
    assert len(others[1]["messages"]) == 3  # the second is told from its beginning


def test_a_full_file_gets_a_number_and_half_a_row_is_cut_off(tmp_path: Path):
    record(tmp_path, [user("x " * 350_000)])
    with (tmp_path / "conversations.jsonl").open("a") as file:
        file.write('{"at": "2026-')  # the server was killed in it

    assert len(record(tmp_path, [user("y " * 350_000)], [user("z")])) == 2  # of 1 MiB, both do not fit beside the first
    assert [row["messages"][0]["content"][0] for row in rows(tmp_path / "conversations-000001.jsonl")] == ["x"]


def test_two_servers_do_not_record_in_one_folder(tmp_path: Path):
    recorder = Recorder(Parrot(), tmp_path, SETTINGS.record, secret_values=[])
    with pytest.raises(ValueError, match=r"another server records there.*another folder"):
        Recorder(Parrot(), tmp_path, SETTINGS.record, secret_values=[])
    recorder.close()


def test_a_disk_that_refuses_ends_no_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder(Parrot(), tmp_path, SETTINGS.record, secret_values=[])

    def refuse(row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder.file, "append", refuse)
    for _ in range(2):
        assert recorder.complete("", CompletionRequest("parrot", [user("hello")])).result().text == "It is fine."
    recorder.close()
    assert recorder.num_recorded == 0 and "No space left" in str(recorder.trouble)
