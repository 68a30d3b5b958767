"""Qwen3-Coder's tags, also of Qwen 3.5 and later and of Nemotron 3: each value is bare text between parameter tags.

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>

Qwen 3.6 and later write `true` and `null` as JSON does; the others write `True` and `None`, except in lists and
objects, which are JSON in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tasks.chat.formats.base import CallFormat, Calls
from tasks.chat.formats.tags import bare_text
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import CLOSE, OPEN

FUNCTION, END_FUNCTION, END_PARAMETER = "<function=", "</function>", "</parameter>"
PARAMETER = re.compile(r"\s*<parameter=([^>]*)>")


def _read(text: str) -> Calls:
    """A function is a call without its outer tags too: Qwen3-Coder leaves the opening one out, and vLLM reads that."""
    *ended, rest = [_bodies(part) for part in text.split(CLOSE)]
    calls = [_read_call(body.strip()) for bodies in (*ended, rest) for body in bodies]
    is_whole = all(ended) and text.count(OPEN) <= len(calls)
    return calls if is_whole else [*calls, None]


def _bodies(part: str) -> list[str]:
    """Of the calls up to a closing tag: one that lacks the opening tag, and one after it."""
    before, opened, body = part.partition(OPEN)
    bare = [before[before.find(FUNCTION) :]] if FUNCTION in before else []
    return [*bare, body] if opened else bare


def _read_call(body: str) -> ToolCall | None:
    if not body.startswith(FUNCTION) or not body.endswith(END_FUNCTION):
        return None
    name, closed, parameters = body[len(FUNCTION) : -len(END_FUNCTION)].partition(">")
    arguments = _read_parameters(parameters)
    if not closed or not name or arguments is None:
        return None
    return ToolCall.model_construct(name=name, arguments=arguments)


def _read_parameters(text: str) -> dict[str, str] | None:
    arguments, position = dict[str, str](), 0
    while found := PARAMETER.match(text, position):
        end = text.find(END_PARAMETER, found.end())
        if end < 0:
            return None
        arguments[found[1]] = text[found.end() : end].removeprefix("\n").removesuffix("\n")
        position = end + len(END_PARAMETER)
    return arguments if not text[position:].strip() else None


def _write(calls: Sequence[ToolCall], *, write_word: Callable[[Any], str]) -> str:
    return "\n".join(_write_call(call, write_word) for call in calls)


def _write_call(call: ToolCall, write_word: Callable[[Any], str]) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{_write_value(value, write_word)}\n{END_PARAMETER}\n"
        for name, value in call.arguments.items()
    )
    return f"{OPEN}\n{FUNCTION}{call.name}>\n{parameters}{END_FUNCTION}\n{CLOSE}"


def _write_value(value: Any, write_word: Callable[[Any], str]) -> str:
    if value is None or isinstance(value, bool):
        return write_word(value)
    return bare_text(value, OPEN, CLOSE, END_PARAMETER)


QWEN_XML = CallFormat(
    "qwen xml",
    _read,
    partial(_write, write_word=json_line),
    has_bare_values=True,
    marks=(OPEN, FUNCTION),
    described_as="<function=example_function_name>",
)
QWEN_XML_PYTHON = CallFormat(
    "qwen xml, python's words", _read, partial(_write, write_word=str), has_bare_values=True, marks=(OPEN, FUNCTION)
)
