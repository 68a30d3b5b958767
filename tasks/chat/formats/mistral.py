"""Mistral: `[TOOL_CALLS]name[ARGS]{…}` for each call (since 2025), or one list of JSON after the mark."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.chat.formats.base import CallFormat, Calls, next_json
from tasks.chat.formats.tags import escape_tags
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call

MARK, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?\[ARGS\]\s*")
LISTED = re.compile(r"\s*(?=\[)")
GAP = re.compile(r"\s*")


def _read(text: str) -> Calls:
    """Up to the first malformed call: what follows one cannot be told from its arguments."""
    calls, position = list[ToolCall | None](), text.find(MARK)
    while position >= 0:
        found = _read_after_mark(text, position + len(MARK))
        if found is None or not found[0]:
            return [*calls, None]
        calls += found[0]
        position = found[1]
        if position == len(text):
            break
        if not text.startswith(MARK, position):
            return [*calls, None]
    return calls


def _read_after_mark(text: str, position: int) -> tuple[Calls, int] | None:
    """(the calls after one mark, where the gap after them ends)."""
    named = NAMED.match(text, position)
    if not named and not LISTED.match(text, position):
        return None
    found = next_json(text, named.end() if named else position, GAP)
    if found is None:
        return None
    value, end = found
    if named:
        return [as_call({"name": named[1], "arguments": value})], end
    return [as_call(item) for item in value], end


def _write_named(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{MARK}{call.name}{ARGUMENTS}{_escape(json_line(call.arguments))}" for call in calls)


def _write_list(calls: Sequence[ToolCall]) -> str:
    return f"{MARK} {_escape(json_line([{'name': call.name, 'arguments': call.arguments} for call in calls]))}"


def _escape(body: str) -> str:
    return escape_tags(body, MARK, CALL_ID, ARGUMENTS)


MISTRAL = CallFormat(
    "mistral",
    _read,
    _write_named,
    "a call is the tool's name after TOOL_CALLS, and one JSON object of its arguments after ARGS",
    marks=(MARK,),
)
MISTRAL_LIST = CallFormat(
    "mistral list",
    _read,
    _write_list,
    'calls are one JSON list of objects with "name" and "arguments" after TOOL_CALLS',
    marks=(MARK,),
)
