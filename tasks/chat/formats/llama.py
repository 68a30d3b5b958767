"""Llama 3.1 to 3.3: a message that is JSON with `name` and `parameters`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tasks.chat.formats.base import CallFormat, Calls, end_of_gap, next_json
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import WITHOUT_ARGUMENTS, as_call

PYTHON_TAG = "<|python_tag|>"  # before a call, in some messages
OPENS_A_CALL = re.compile(r"\s*(\[\s*)?\{")
BETWEEN_CALLS = re.compile(r"[\s;]*")
MARKS_OF_A_CALL = {"function", "parameters", "arguments"}
MOST_VALUES = 10_000  # of one message; what rambles on beyond them is not read


def _read(text: str) -> Calls:
    """Calls in a message that is JSON from its first character, or after the tag. JSON without a call is an answer."""
    tagged, body = "", text
    if not OPENS_A_CALL.match(text):
        _, tagged, body = text.partition(PYTHON_TAG)
        if not tagged:
            return []
    values, is_whole = _read_values(body)
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    if not tagged and is_whole and not any(map(_is_meant_as_call, items)):
        return []
    calls = [as_call(item, keys=("parameters", "arguments")) for item in items]
    return calls if calls and is_whole else [*calls, None]


def _is_meant_as_call(item: Any) -> bool:
    """Not `{"name": "Alice", "age": 30}`, which says what no call does. vLLM's parser has it as an answer too."""
    if not isinstance(item, dict):
        return False
    return bool(MARKS_OF_A_CALL & item.keys()) or ("name" in item and item.keys() <= WITHOUT_ARGUMENTS)


def _read_values(text: str) -> tuple[list[Any], bool]:
    """(the JSON values between which there are spaces or semicolons, whether that is all)."""
    values, position = list[Any](), end_of_gap(text, 0, BETWEEN_CALLS)
    while position < len(text) and len(values) < MOST_VALUES:
        found = next_json(text, position, BETWEEN_CALLS)
        if found is None:
            return values, False
        value, position = found
        values.append(value)
    return values, position == len(text)


def _write(calls: Sequence[ToolCall]) -> str:
    return "; ".join(json_line({"name": call.name, "parameters": call.arguments}) for call in calls)


LLAMA = CallFormat("llama", _read, _write, 'a call is one JSON object with "name" and "parameters"')
