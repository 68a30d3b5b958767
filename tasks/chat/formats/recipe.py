"""The recipe: a format that the prompt explains, for every model whose template shows none of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.chat.formats.base import CallFormat, Calls
from tasks.chat.formats.tags import escape_tags
from tasks.core import json_text
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call, between_tags

OPEN, CLOSE, FINISHED = "<tool>", "</tool>", "<TASK_FINISHED>"


def _read(text: str) -> Calls:
    """A message with calls is not final even if it says so: it has not seen their replies."""
    bodies, is_whole = between_tags(text, OPEN, CLOSE)
    calls = [call for body in bodies for call in _read_list(body)]
    return calls if is_whole else [*calls, None]


def _read_list(body: str) -> Calls:
    try:
        value = json_text.parse(body.strip(), max_depth=json_text.MAX_DEPTH + 1)
    except ValueError:
        return [None]
    items = value if isinstance(value, list) else [value]
    return [as_call(item, keys=("arguments", "args")) for item in items] or [None]


def _write(calls: Sequence[ToolCall]) -> str:
    body = json_line([{"name": call.name, "arguments": call.arguments} for call in calls])
    return f"{OPEN}{escape_tags(body, OPEN, CLOSE)}{CLOSE}"


def _close(answer: str) -> str:
    return f"{answer}\n{FINISHED}"


def _answer(text: str) -> str:
    return text.replace(FINISHED, "").strip()


def instructions(tools: Sequence[dict[str, Any]]) -> str:
    example = '[{"name": "tool_name", "arguments": {"argument_name": "value"}}]'
    return (
        "You can use tools. Each line here describes one of them in JSON:\n"
        + "\n".join(json_line(tool) for tool in tools)
        + "\n\nTo call tools, write a JSON list of the calls between tags, and nothing after it:\n"
        + f"{OPEN}{example}{CLOSE}\n"
        + "The next message holds their replies. A call that fails can be corrected and made again.\n"
        + f"When the request is fulfilled, write your answer to the user and then {FINISHED}"
    )


SHAPE = f'calls are one JSON list of objects with "name" and "arguments" between {OPEN} and {CLOSE}'
RECIPE = CallFormat("recipe", _read, _write, SHAPE, _close, _answer, marks=(OPEN,))
