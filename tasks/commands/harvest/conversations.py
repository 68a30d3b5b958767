"""Reads what `serve --record` wrote (`serve/recorder.py`): each conversation from its first message to its last reply;
and plain logs, in which a row is a whole conversation as OpenAI's chat completions have it.

The text is whoever's talked to the agent: data, which is compared and copied, and never followed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat, takewhile
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from tasks.core import json_text
from tasks.core.files import json_hash
from tasks.core.records import Record, ReferenceTurn, ToolCall
from tasks.core.secrets import HIDDEN
from tasks.core.text import one_line
from tasks.gateway.completions import ProtocolError
from tasks.gateway.protocols import chat
from tasks.tools.judge.prompt import Judged

FILES, CURRENT = "conversations*.jsonl", "conversations.jsonl"
FORM = 'Write rows as `serve --record` does, or {"messages": […], "tools": […]} as OpenAI\'s chat completions have them'


class _Function(Record):
    name: str = Field(min_length=1)
    arguments: dict[str, Any]


class _Call(Record):
    id: str
    type: str
    function: _Function


class Message(Record):
    role: str
    content: str = ""
    tool_calls: list[_Call] = Field(default_factory=list)
    tool_call_id: str | None = None
    thought: str | None = None
    reasoning_content: str | None = None


class _Row(Record):
    at: str
    conversation: str = Field(pattern="^[0-9a-f]{24}$")
    number: int = Field(ge=0)
    version: str
    tools: list[dict[str, Any]] = Field(default_factory=list)
    messages: list[Message]
    reply: Message
    finish: str
    num_prompt_tokens: int
    num_written_tokens: int


@dataclass(frozen=True)
class Conversation:
    """`version` wrote its last reply. `finishes`: how each row's reply ended. `is_whole`: all its rows are there."""

    id: str
    version: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    finishes: list[str]
    is_whole: bool

    @cached_property
    def turns(self) -> list[tuple[str, list[tuple[ToolCall, str]], str]]:
        """Of each request of the user: its text, the calls with their replies, and the closing message; "" where there
        is none yet. Messages of the user that follow one another are one.
        """
        found: list[tuple[str, list[tuple[ToolCall, str]], str]] = []
        for number, (before, message) in enumerate(zip([None, *self.messages], self.messages, strict=False)):
            if message.role == "user" and before is not None and before.role == "user":
                found[-1] = (f"{found[-1][0]}\n\n{message.content}", [], "")
            elif message.role == "user":
                found.append((message.content, [], ""))
            elif message.role == "assistant" and found:
                request, calls, _ = found[-1]
                following = takewhile(lambda one: one.role == "tool", self.messages[number + 1 :])
                made = _answered(message.tool_calls, list(following))
                found[-1] = (request, [*calls, *made], "" if made else message.content)
        return found

    @property
    def user_messages(self) -> list[str]:
        """Each as it was sent: several may be one request."""
        return [message.content for message in self.messages if message.role == "user"]

    @property
    def requests(self) -> list[str]:
        return [request for request, _, _ in self.turns]

    @property
    def final_message(self) -> str:
        return self.turns[-1][2]

    @property
    def fault(self) -> str | None:
        """Why it is no problem, whatever it is worth."""
        if not self.is_whole:
            return "some of its rows are missing"
        if not self.turns or not all(request.strip() for request in self.requests):
            return "nobody asks anything"
        if "length" in self.finishes:
            return "an answer was cut off by max_tokens"
        if self.finishes[-1] != "stop" or not all(answer.strip() for _, _, answer in self.turns):
            return "it has no closing message"
        if any(HIDDEN in request for request in self.requests):
            return "a request was redacted"
        if any(HIDDEN in answer for _, _, answer in self.turns):
            return "an answer was redacted"
        return None

    def judged(self) -> Judged:
        """What a judge reads of it."""
        events: list[dict[str, Any]] = []
        for number, (_, calls, answer) in enumerate(self.turns):
            events += [{"tool": call.name, "arguments": call.arguments, "reply": reply} for call, reply in calls]
            if number + 1 < len(self.turns):
                events.append({"message": answer, "user": self.turns[number + 1][0]})
        return Judged(self.requests, events, self.final_message)

    def reference(self, *, with_calls: bool) -> list[ReferenceTurn]:
        return [
            ReferenceTurn(calls=[call for call, _ in calls] if with_calls else [], answer=answer)
            for _, calls, answer in self.turns
        ]

    def to_row(self) -> dict[str, Any]:
        """As a checker gets it."""
        messages = [message.model_dump(exclude_defaults=True) for message in self.messages]
        return {"id": self.id, "version": self.version, "messages": messages, "tools": self.tools}


@dataclass(frozen=True, slots=True)
class Recorded:
    """`first_fault`: of the rows that cannot be read, where the first is and what is wrong with it."""

    conversations: list[Conversation]
    num_unreadable: int
    first_fault: str


def read_conversations(source: Path) -> Recorded:
    """Of a file, or of a folder as `serve --record` leaves it, in order of their first rows. ValueError where there is
    nothing, or no row can be read.
    """
    rows: dict[str, list[_Row]] = {}
    logged, num_unreadable, first_fault = list[Conversation](), 0, ""
    with ExitStack() as opened:
        files = _open_all(source, opened)
        if not files:
            raise ValueError(
                f"{source}: is no file and has no {FILES}, so there is nothing to harvest. Record conversations with "
                f"`python -m tasks serve SOURCE --record {source}`."
            )
        for name, number, line in ((file.name, *item) for file in files for item in enumerate(file, start=1)):
            try:
                row = _read(line)
            except ValueError as error:  # the last of a server that writes, or was killed; or a log of another form
                num_unreadable += 1
                first_fault = first_fault or f"{name}, line {number}: {_in_words(error)}"
            else:
                if isinstance(row, Conversation):
                    logged.append(row)
                else:
                    rows.setdefault(row.conversation, []).append(row)
    if num_unreadable and not (rows or logged):
        raise ValueError(f"{first_fault}. No other row can be read either, so nothing was harvested. {FORM}.")
    found = [*(_joined(name, of_it) for name, of_it in rows.items()), *logged]
    return Recorded(found, num_unreadable, first_fault)


def _open_all(source: Path, opened: ExitStack) -> list[IO[bytes]]:
    """Each file once, as of one moment. The current one is opened first: a server that gives it a number meanwhile
    shows it under both names, and never under none.
    """
    if source.is_file():
        return [opened.enter_context(source.open("rb"))]
    current = list[IO[bytes]]()
    with suppress(FileNotFoundError):
        current.append(opened.enter_context((source / CURRENT).open("rb")))
    others = [opened.enter_context(file.open("rb")) for file in sorted(source.glob(FILES)) if file.name != CURRENT]
    twice = {_identity(file) for file in current}
    return [*(file for file in others if _identity(file) not in twice), *current]


def _identity(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _read(line: bytes) -> _Row | Conversation:
    """ValueError for a line that is no row."""
    value = json_text.parse(line, max_depth=json_text.MAX_ROW_DEPTH)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if "conversation" not in value and "messages" in value:
        return _logged(value)
    return _Row.model_validate(value)


def _logged(row: Mapping[str, Any]) -> Conversation:
    """Whole in one row. The gateway's own reading of the protocol: content in parts, arguments as text."""
    try:
        asked = chat.read({"model": "logged", "messages": row["messages"], "tools": row.get("tools")}).request
    except ProtocolError as error:
        raise ValueError(error.message) from None
    messages, tools = [Message.model_validate(dict(message)) for message in asked.messages], list(asked.tools)
    ends_closed = messages[-1].role == "assistant"
    name = json_hash([message.model_dump() for message in messages])[:24]
    return Conversation(name, "logged", messages, list(map(dict, tools)), ["stop" if ends_closed else ""], True)


def _in_words(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return one_line(str(error).rstrip("."))
    fault = error.errors()[0]
    return one_line(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}")


def _answered(calls: list[_Call], replies: list[Message]) -> list[tuple[ToolCall, str]]:
    """Each call of a message with its reply, "" if it has none: by their ids, or in order where a client has others."""
    asked, answering = [call.id for call in calls], [reply.tool_call_id for reply in replies]
    texts = [reply.content for reply in replies]
    if len({*asked}) == len(asked) and len({*answering}) == len(answering) and {*asked}.issuperset(answering):
        by_id = dict(zip(answering, texts, strict=True))
        texts = [by_id.get(id, "") for id in asked]
    made = [ToolCall(**call.function.model_dump()) for call in calls]
    return list(zip(made, chain(texts, repeat("")), strict=False))


def _joined(name: str, rows: list[_Row]) -> Conversation:
    rows = sorted(rows, key=lambda row: row.number)
    is_whole = [row.number for row in rows] == [*range(len(rows))]
    messages = [message for row in rows for message in (*row.messages, row.reply)]
    return Conversation(name, rows[-1].version, messages, rows[0].tools, [row.finish for row in rows], is_whole)
