"""Tool calls as text, written and parsed.

The format is Hermes, on which Qwen models are trained: one JSON object with `name` and `arguments` between
`<tool_call>` tags, any number per message. A message without a tag is a closing message. Model text is parsed as JSON,
never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable

from tasks.core import json_text
from tasks.core.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SHAPE = 'a call is one JSON object with "name" and "arguments"'  # what a tool says to a call that cannot be read
WITHOUT_ARGUMENTS = {"name", "id", "type"}  # what a call may say beside its arguments, and alone where it has none


def call_text(call: ToolCall) -> str:
    """The assistant message with one call. Not ASCII-escaped, as in chat templates."""
    body = json_text.json_line({"name": call.name, "arguments": call.arguments})
    return f"{OPEN}\n{body}\n{CLOSE}"


def _parse_call(body: str) -> ToolCall | None:
    try:
        return as_call(json_text.parse(body.strip()))
    except ValueError:
        return None


def parse_calls(text: str, *, parse: Callable[[str], ToolCall | None] = _parse_call) -> list[ToolCall | None]:
    """The calls in an assistant message; None for a malformed one. Empty: a closing message."""
    bodies, is_whole = between_tags(text, OPEN, CLOSE)
    calls = [parse(body) for body in bodies]
    return calls if is_whole else [*calls, None]


def between_tags(text: str, opening: str, closing: str) -> tuple[list[str], bool]:
    """(texts, whether each tag has its pair). A regular expression takes minutes on a page of spaces."""
    bodies, position = list[str](), 0
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        bodies.append(text[start + len(opening) : end])
        position = end + len(closing)
    return bodies, text.count(opening) <= len(bodies)


def as_call(value: object, *, keys: tuple[str, ...] = ("arguments",)) -> ToolCall | None:
    """The call in a JSON value, its arguments (an object, or JSON of one as text) under the first of `keys` that
    exists; None if it is not a call, or contains what no file can: NaN, half a surrogate pair, too deep nesting.

    A call without arguments says nothing else: those under a key that nobody reads would be lost.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    key = next((key for key in keys if key in value), None)
    if key is None and not value.keys() <= WITHOUT_ARGUMENTS:
        return None
    arguments: object = {} if key is None else value[key]
    try:
        arguments = json_text.parse(arguments) if isinstance(arguments, str) else arguments
        json_text.check_writable([value["name"], arguments], max_depth=json_text.MAX_DEPTH)
    except ValueError:
        return None
    return ToolCall(name=value["name"], arguments=arguments) if isinstance(arguments, dict) else None
