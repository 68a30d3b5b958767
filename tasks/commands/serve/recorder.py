"""Writes served conversations down, for whoever asked for it: JSON lines, a row for each reply.

    {"at", "conversation", "number", "version", "messages", "reply", "finish",
     "num_prompt_tokens", "num_written_tokens"}

`messages` are those since the row before of the same conversation, `number` counts its rows from 0, and the first has
its `tools`. A row is written whole, or, where the process is killed, cut off by the next one that writes here. Every
string is redacted before it leaves memory: the key, known secrets, and what matches `serve.record.redact`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.core.secrets import HIDDEN, Secrets, hide_known_secrets
from tasks.core.terminal import warn
from tasks.core.text import one_line
from tasks.gateway.completions import Backend, Completion, CompletionRequest
from tasks.pipeline.settings import RecordSettings

CURRENT, FULL = "conversations.jsonl", "conversations-{:06}.jsonl"
MAX_KNOWN = 20_000  # conversations that may still go on


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
    """A Backend that hands everything on to `inner` and records what was answered. ValueError where another server
    records in `folder`.
    """

    def __init__(self, inner: Backend, folder: Path, settings: RecordSettings, *, secret_values: Sequence[str]):
        self.inner, self.file = inner, _File(folder, max_bytes=settings.max_file_mib << 20)
        self.redaction = Redaction(settings.redact, secret_values)
        self.num_recorded = 0
        self.trouble: str | None = None
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()  # of a history: its conversation, its rows
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recorder")  # no reply waits for the disk

    def models(self, key: str) -> Sequence[str]:
        return self.inner.models(key)

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        answer = self.inner.complete(key, request)
        answer.add_done_callback(lambda done: self._take(request, done))
        return answer

    def close(self) -> None:
        """Once all that was answered is written."""
        self._writer.shutdown()
        self.file.close()

    def _take(self, request: CompletionRequest, done: Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._writer.submit(self._write, request, done.result())

    def _write(self, request: CompletionRequest, completion: Completion) -> None:
        try:
            self.file.append(self.redaction.value(self._row(request, completion)))
            self.num_recorded += 1
        except Exception as error:  # a full disk ends no conversation, nor does what cannot be written
            if self.trouble is None:
                warn(f"warning: {self.file.folder}: conversations are not recorded: {one_line(error)}.")
            self.trouble = one_line(error)

    def _row(self, request: CompletionRequest, completion: Completion) -> dict[str, Any]:
        reply = reply_message(completion)
        histories = _histories([*request.messages, reply])
        before = next(
            (number for number in reversed(range(len(request.messages))) if histories[number] in self._known), None
        )
        name, number = (secrets.token_hex(12), 0) if before is None else self._known.pop(histories[before])
        self._known[histories[-1]] = name, number + 1
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "conversation": name,
            "number": number,
            "version": completion.version,
            **({"tools": list(request.tools)} if number == 0 else {}),
            "messages": list(request.messages[0 if before is None else before + 1 :]),
            "reply": reply,
            "finish": completion.finish,
            "num_prompt_tokens": completion.num_prompt_tokens,
            "num_written_tokens": completion.num_written_tokens,
        }


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


def _histories(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A hash of the history up to each message, its own included; thoughts and the ids of calls say nothing in it."""
    found, so_far = list[str](), ""
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


class _File:
    """The rows of one server; a full file gets a number. Only its owner may read it."""

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._open()

    def append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")
        if self._size and self._size + len(line) > self.max_bytes:
            self._rotate()
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # no half row
            raise
        self._size += len(line)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> None:
        path = self.folder / CURRENT
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise ValueError(
                f"--record {self.folder}: another server records there, and two would mix their rows. Name another "
                f"folder."
            ) from None
        content = path.read_bytes()
        self._size = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._size)  # what a killed server left of a row

    def _rotate(self) -> None:
        taken = [
            int(file.stem[-6:]) for file in self.folder.glob("conversations-??????.jsonl") if file.stem[-6:].isdecimal()
        ]
        os.rename(self.folder / CURRENT, self.folder / FULL.format(max(taken, default=0) + 1))
        os.close(self._descriptor)
        self._open()
