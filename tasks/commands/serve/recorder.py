"""Writes served conversations down, for whoever asked for it: JSON lines, a row for each reply.

    {"at", "conversation", "number", "version", "messages", "reply", "finish",
     "num_prompt_tokens", "num_written_tokens"}

`messages` are those since the row before of the same conversation, `number` counts its rows from 0, and the first has
its `tools`. A row is written whole, or, where the process is killed, cut off by the next one that writes here. Every
string that somebody said is redacted before it leaves memory: the key, known secrets, and what matches
`serve.record.redact`. Roles, the ids of calls and the row's own counts stay: they join the rows.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

from tasks.commands.serve.row_file import RowFile
from tasks.core.secrets import HIDDEN, Secrets, hide_known_secrets
from tasks.core.terminal import warn
from tasks.core.text import one_line
from tasks.gateway.completions import Backend, Completion, CompletionRequest
from tasks.pipeline.settings import RecordSettings

MAX_KNOWN = 20_000  # conversations that may still go on
MAX_WAITING = 1000  # rows that are not written yet: of a disk that stands still, memory must not hold them all
STALL_SECONDS = 10.0  # in which a disk that is to end its work must write a row


class Redaction:
    """Hides `secret_values`, secrets of the environment and what matches a pattern, in every string and number."""

    def __init__(self, patterns: Sequence[str], secret_values: Sequence[str]):
        self.patterns = [re.compile(pattern) for pattern in patterns]
        self.secrets = Secrets(secret_values)

    def text(self, text: str) -> str:
        text = hide_known_secrets(self.secrets.hide(text))
        for pattern in self.patterns:
            text = pattern.sub(HIDDEN, text)
        return text

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._part(name, value) for name, value in message.items()}

    def _part(self, name: str, value: Any) -> Any:
        if name in ("role", "tool_call_id"):
            return value
        if name == "tool_calls" and value:
            return [{**call, "function": self.value(call["function"])} for call in value]
        return self.value(value)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self.text(str(value)) != str(value):
            return HIDDEN
        return value


class Recorder:
    """A Backend that hands everything on to `inner` and records in `file` what was answered."""

    def __init__(self, inner: Backend, file: RowFile, settings: RecordSettings, *, secret_values: Sequence[str]):
        self.inner, self.file = inner, file
        self.redaction = Redaction(settings.redact, secret_values)
        self.num_recorded = self.num_not_recorded = 0
        self.trouble: str | None = None
        self._num_lost = 0  # since `trouble` began
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()  # of a history: its conversation, its rows
        self._counting = threading.Lock()
        self._waiting: SimpleQueue[tuple[str, CompletionRequest, Completion] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="recorder", daemon=True)  # no reply waits for the disk
        self._writer.start()

    def models(self, key: str) -> Sequence[str]:
        return self.inner.models(key)

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        answer = self.inner.complete(key, request)
        answer.add_done_callback(lambda done: self._take(key, request, done))
        return answer

    def close(self) -> None:
        """Once all that was answered is written, or the disk stands still."""
        self._waiting.put(None)
        num_left = self._waiting.qsize() + 1
        while self._writer.is_alive() and self._waiting.qsize() < num_left:
            num_left = self._waiting.qsize()  # the end that was put there, and one that is being written: as many rows
            self._writer.join(STALL_SECONDS)
        if self._writer.is_alive():
            self._count_lost(f"the disk wrote nothing for {STALL_SECONDS:g} s", num_left)
        else:
            self.file.close()

    def _take(self, key: str, request: CompletionRequest, done: Future[Completion]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((key, request, done.result()))
        else:
            self._count_lost(f"the disk is too slow, {MAX_WAITING:,} rows wait for it already")

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            try:
                self._write(*taken)
            except Exception as error:  # a full disk ends no conversation, nor does what cannot be written
                self._count_lost(one_line(error))
            else:
                self._count_written()

    def _count_lost(self, why: str, num_rows: int = 1) -> None:
        with self._counting:
            self.num_not_recorded += num_rows
            self._num_lost += num_rows
            if self.trouble is None:
                warn(f"warning: {self.file.folder}: conversations are not recorded: {why}.")
            self.trouble = why

    def _count_written(self) -> None:
        """A trouble is over once no row waits: a disk that is too slow loses others in between."""
        with self._counting:
            self.num_recorded += 1
            if self.trouble is not None and self._waiting.empty():
                warn(f"{self.file.folder}: conversations are recorded again; rows that were lost: {self._num_lost:,}.")
                self.trouble, self._num_lost = None, 0

    def _write(self, key: str, request: CompletionRequest, completion: Completion) -> None:
        """What a row that was lost had of the history is in the next one."""
        if self.file.let_go_of_moved():  # nobody may read both: conversations that go on are told once more
            self._known.clear()
        reply = reply_message(completion)
        histories = _histories(key, request.tools, [*request.messages, reply])
        before = next(
            (number for number in reversed(range(len(request.messages))) if histories[number] in self._known), None
        )
        name, number = (secrets.token_hex(12), 0) if before is None else self._known[histories[before]]
        row = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "conversation": name,
            "number": number,
            "version": completion.version,
            **({"tools": self.redaction.value(request.tools)} if number == 0 else {}),
            "messages": [
                self.redaction.message(one) for one in request.messages[0 if before is None else before + 1 :]
            ],
            "reply": self.redaction.message(reply),
            "finish": completion.finish,
            "num_prompt_tokens": completion.num_prompt_tokens,
            "num_written_tokens": completion.num_written_tokens,
        }
        self.file.append(row)
        if before is not None:
            del self._known[histories[before]]  # whoever goes on from there too is another conversation
        self._known[histories[-1]] = name, number + 1
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def reply_message(completion: Completion) -> dict[str, Any]:
    """As a client sends it back in the history, and the thought."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in completion.calls
    ]
    thought = {} if completion.thought is None else {"thought": completion.thought}
    return {
        "role": "assistant", "content": completion.text, **({"tool_calls": calls} if calls else {}), **thought,
    }  # fmt: skip


def _histories(key: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A hash of the history up to each message, its own included; thoughts and the ids of calls say nothing in it.
    Conversations of two keys, or with other tools, are never one.
    """
    opening = json.dumps([key, sorted(json.dumps(tool, sort_keys=True) for tool in tools)])
    found, so_far = list[str](), hashlib.sha256(opening.encode()).hexdigest()
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        said = [
            message["role"],
            (message.get("content") or "").strip(),
            [[one["name"], one["arguments"]] for one in calls],
        ]
        so_far = hashlib.sha256(f"{so_far}{json.dumps(said, sort_keys=True)}".encode()).hexdigest()
        found.append(so_far)
    return found
