"""What is written of served conversations: a row for each reply, redacted, whole, and joined by what was said."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from tasks.commands.serve import recorder as recording
from tasks.commands.serve.recorder import Recorder
from tasks.commands.serve.row_file import RowFile
from tasks.commands.serve.serving import Keys, Serving
from tasks.gateway.completions import Completion, CompletionRequest, WrittenCall
from tests.commands.serve.clients import until, user
from tests.commands.serve.conftest import PLAY, SETTINGS

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


def recorder_in(folder: Path) -> Recorder:
    rows = RowFile(folder, max_bytes=SETTINGS.record.max_file_mib << 20)
    return Recorder(Parrot(), rows, SETTINGS.record, secret_values=[KEY])


def record(folder: Path, *histories: list[dict[str, Any]]) -> list[dict[str, Any]]:
    recorder = recorder_in(folder)
    for messages in histories:
        recorder.complete(KEY, CompletionRequest("parrot", messages)).result()
    recorder.close()
    return rows(folder / "conversations.jsonl")


def complete(recorder: Recorder, *histories: list[dict[str, Any]]) -> None:
    """Each is written, or lost, before this returns."""

    def num_done() -> int:
        return recorder.num_recorded + recorder.num_not_recorded

    num_rows = num_done() + len(histories)
    for messages in histories:
        recorder.complete(KEY, CompletionRequest("parrot", messages)).result()
    until(lambda: num_done() == num_rows)


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


def test_a_file_that_was_there_is_its_owners_alone_too(tmp_path: Path):
    (tmp_path / "conversations.jsonl").touch(mode=0o644)
    RowFile(tmp_path, max_bytes=20).close()
    assert (tmp_path / "conversations.jsonl").stat().st_mode & 0o777 == 0o600


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
    recorder = recorder_in(tmp_path)
    with pytest.raises(ValueError, match=r"another server records there.*another folder"):
        recorder_in(tmp_path)
    recorder.close()


SAID = {"role": "assistant", "content": "It is fine."}


@pytest.mark.parametrize("way", ["removed", "moved", "replaced", "with its folder"])
def test_a_file_that_was_moved_while_it_is_written_is_begun_anew_by_whole_conversations(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, aside = tmp_path / "served", tmp_path / "aside"
    recorder = recorder_in(folder)
    complete(recorder, [user("one")])
    if way == "removed":
        (folder / "conversations.jsonl").unlink()
    elif way == "with its folder":
        folder.rename(aside)
    else:
        (folder / "conversations.jsonl").rename(aside)
    if way == "replaced":
        (folder / "conversations.jsonl").write_text("")
    complete(recorder, [user("one"), SAID, user("two")], [user("new")])

    with pytest.raises(ValueError, match="another server records there"):
        recorder_in(folder)
    recorder.close()
    found = [(row["number"], len(row["messages"])) for row in rows(folder / "conversations.jsonl")]
    assert found == [(0, 3), (0, 1)] and (recorder.num_recorded, recorder.trouble) == (3, None)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "conversations.jsonl was moved or removed" in warning


def test_a_full_file_that_was_removed_needs_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = RowFile(tmp_path, max_bytes=20)
    rename = Path.rename
    file.append({"a": "x" * 20})

    def rename_too_late(path: Path, target: Path) -> Path:
        path.unlink()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)
    file.append({"b": 1})
    with pytest.raises(ValueError, match="another server records there"):
        RowFile(tmp_path, max_bytes=20)  # though the file that was there at first is gone
    file.close()
    assert rows(tmp_path / "conversations.jsonl") == [{"b": 1}]
    RowFile(tmp_path, max_bytes=20).close()


def test_a_disk_that_refuses_ends_no_conversation_and_the_next_row_has_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    recorder = recorder_in(tmp_path)
    complete(recorder, [user("one")])
    write = os.write

    def write_half(descriptor: int, line: bytes) -> int:
        return write(descriptor, line[:9])

    monkeypatch.setattr(os, "write", write_half)
    complete(recorder, [user("one"), SAID, user("two")], [user("new")])
    assert (recorder.num_recorded, recorder.num_not_recorded, recorder.trouble) == (1, 2, "the disk is full")
    monkeypatch.undo()
    complete(recorder, [user("one"), SAID, user("two"), SAID, user("three")], [user("new"), SAID, user("and?")])
    recorder.close()

    assert (recorder.num_recorded, recorder.num_not_recorded, recorder.trouble) == (3, 2, None)
    first, later, new = rows(tmp_path / "conversations.jsonl")
    assert (later["conversation"], later["number"]) == (first["conversation"], 1)
    assert [message["content"] for message in later["messages"]] == ["two", "It is fine.", "three"]
    assert (new["number"], len(new["messages"])) == (0, 3)
    began, ended = capsys.readouterr().err.splitlines()
    assert "not recorded: the disk is full" in began and ended.endswith("recorded again; rows that were lost: 2.")


def test_a_disk_that_stands_still_holds_neither_memory_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "MAX_WAITING", 2)
    monkeypatch.setattr(recording, "STALL_SECONDS", 0.05)
    recorder, begun, goes_on = recorder_in(tmp_path), threading.Event(), threading.Event()

    def stand_still(row: dict[str, Any]) -> None:
        begun.set()
        goes_on.wait()

    monkeypatch.setattr(recorder.file, "append", stand_still)
    for number in range(5):  # one is being written, two wait
        recorder.complete(KEY, CompletionRequest("parrot", [user(f"{number}")])).result()
        assert begun.wait(10)
    assert recorder.num_not_recorded == 2 and "2 rows wait" in str(recorder.trouble)
    recorder.close()
    assert (recorder.num_recorded, recorder.num_not_recorded) == (0, 5) and "wrote nothing" in str(recorder.trouble)
    goes_on.set()


def test_conversations_of_two_keys_or_with_other_tools_are_never_one(tmp_path: Path):
    opening, tools = [user("hello")], [{"type": "function", "function": {"name": "book"}}]
    longer = [*opening, {"role": "assistant", "content": "It is fine."}, user("and?")]
    recorder = recorder_in(tmp_path)
    for key, given, messages in (
        ("ann", (), opening),
        ("bob", (), longer),
        ("ann", tools, longer),
        ("ann", (), longer),
    ):
        recorder.complete(key, CompletionRequest("parrot", messages, given)).result()
    recorder.close()
    first, *others = rows(tmp_path / "conversations.jsonl")
    assert [row["conversation"] == first["conversation"] for row in others] == [False, False, True]


def test_redaction_leaves_what_joins_rows_and_calls(tmp_path: Path):
    settings = SETTINGS.record.model_copy(update={"redact": [r"\w*\d\w*", "user|assistant|function|stop|4_111"]})
    rows_of = RowFile(tmp_path, max_bytes=1 << 20)
    recorder = Recorder(Parrot(), rows_of, settings, secret_values=[])
    recorder.complete("", CompletionRequest("parrot", [user("look for user 7")])).result()
    recorder.close()
    row = rows(tmp_path / "conversations.jsonl")[0]
    assert row["messages"] == [{"role": "user", "content": "look for [redacted] [redacted]"}]
    assert (row["reply"]["role"], row["reply"]["tool_calls"][0]["id"]) == ("assistant", "call_1")
    assert (row["num_prompt_tokens"], row["number"], row["version"], row["finish"]) == (3, 0, "parrot/1", "tool_calls")
    assert row["reply"]["tool_calls"][0]["function"]["arguments"]["card"] == "[redacted]"


def test_a_file_that_cannot_be_begun_costs_its_row_and_no_row_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = RowFile(tmp_path / "r", max_bytes=20)
    file.append({"a": "x" * 20})
    open_file = os.open

    def refuse(*given: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    strangers = []
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            file.append({"b": 1})
        strangers.append(open_file(tmp_path / "stranger", os.O_RDWR | os.O_CREAT))  # takes the number that is free
    monkeypatch.undo()
    file.append({"c": 1})
    file.close()
    for number in strangers:
        os.close(number)
    assert (tmp_path / "stranger").read_bytes() == b""
    assert rows(tmp_path / "r" / "conversations.jsonl") == [{"c": 1}]
    assert rows(tmp_path / "r" / "conversations-000001.jsonl") == [{"a": "x" * 20}]


def test_a_place_where_nothing_can_be_written_is_refused_before_the_model_is_looked_up(tmp_path: Path):
    (tmp_path / "file").write_text("mine")

    class Untouched:
        def now(self) -> Any:
            raise AssertionError

    for place in (tmp_path / "file", tmp_path / "file" / "r", Path("/proc/r")):
        with pytest.raises(ValueError, match=r"--record .*: nothing can be written there.*Name a folder"):
            Serving(cast(Any, Untouched()), PLAY, SETTINGS, keys=Keys(), record=place)
