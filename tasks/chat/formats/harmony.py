"""Harmony, of gpt-oss: messages with a channel within one turn; a call is a message to `functions.NAME`.

    <|channel|>analysis<|message|>thought<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}

What is for the user is in the channel `final`; other messages are thoughts and preambles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.chat.formats.base import CallFormat, Calls
from tasks.chat.formats.tags import escape_tags
from tasks.core import json_text
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call

MESSAGE, CALL, NAMESPACE = "<|message|>", "<|call|>", "functions."
FINAL = "<|channel|>final"
NEXT = f"{CALL}<|start|>assistant"
END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return|start)\|>")
RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]+)")
NO_TOOLS = {"assistant", "user", "all"}


def _messages(text: str) -> list[tuple[str, str]]:
    """(header, body) of each message; the header of a text without any mark is empty."""
    parts = [part.partition(MESSAGE) for part in END_OF_MESSAGE.split(text)]
    if not any(mark for _, mark, _ in parts):
        return [("", text)]
    return [(header, body) for header, mark, body in parts if mark]


def _read(text: str) -> Calls:
    calls: Calls = []
    for header, body in _messages(text):
        recipient = RECIPIENT.search(header)
        if recipient and recipient[1] not in NO_TOOLS:
            calls.append(_read_call(recipient[1].removeprefix(NAMESPACE), body))
    return calls


def _read_call(name: str, body: str) -> ToolCall | None:
    try:
        return as_call({"name": name, "arguments": json_text.parse(body)})
    except ValueError:
        return None


def _write(calls: Sequence[ToolCall]) -> str:
    return NEXT.join(map(_write_call, calls))


def _write_call(call: ToolCall) -> str:
    body = escape_tags(json_line(call.arguments), "<|")
    return f" to={NAMESPACE}{call.name}<|channel|>commentary json{MESSAGE}{body}"


def _close(answer: str) -> str:
    return f"{FINAL}{MESSAGE}{answer}"


def _answer(text: str) -> str:
    """The last message of the channel `final`; a text without channels as it is."""
    bodies = [body for header, body in _messages(text) if not header or FINAL in header]
    return bodies[-1] if bodies else ""


SHAPE = f"a call is a message to {NAMESPACE}NAME with one JSON object of its arguments"
HARMONY = CallFormat("harmony", _read, _write, SHAPE, _close, _answer)
