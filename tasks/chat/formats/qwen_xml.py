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
HEAD, END = re.compile(r"<function=([^<>]+)>"), re.compile(r"\s*</function>")
PARAMETER = re.compile(r"\s*<parameter=([^>]*)>")


def _read(text: str) -> Calls:
    """Every function is a call, whatever its outer tags: Qwen3-Coder leaves the opening one out or writes two functions
    in one pair, and vLLM reads those. A lone closing tag is text; an opening one without a function is malformed.
    """
    return [call for part in text.split(CLOSE) for call in _read_functions(part)]


def _read_functions(text: str) -> Calls:
    """Those up to a closing tag. One that is only named, before another, is text."""
    calls, start, outside = list[ToolCall | None](), text.find(FUNCTION), 0
    while start >= 0:
        call, end = _read_function(text, start)
        following = text.find(FUNCTION, end)
        if call is None:
            closing = text.find(END_FUNCTION, end, following if following >= 0 else len(text))
            if closing < 0 <= following and end == start + len(FUNCTION):
                start = following
                continue
            end = closing + len(END_FUNCTION) if closing >= 0 else end
        unused = [None] if text.count(OPEN, outside, start) > 1 else []
        calls += [*unused, call]
        start, outside = following, end
    return [*calls, None] if OPEN in text[outside:] else calls


def _read_function(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call, and where it ends; None, and where reading on can begin."""
    head = HEAD.match(text, start)
    arguments, position = dict[str, str](), head.end() if head else start
    while head and (found := PARAMETER.match(text, position)):
        end = text.find(END_PARAMETER, found.end())
        if end < 0:
            return None, len(text)
        arguments[found[1]] = text[found.end() : end].removeprefix("\n").removesuffix("\n")
        position = end + len(END_PARAMETER)
    if head and (ended := END.match(text, position)):
        return ToolCall.model_construct(name=head[1], arguments=arguments), ended.end()
    return None, position if arguments else start + len(FUNCTION)


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


SHAPE = f"a call is {FUNCTION}NAME>, a <parameter=KEY>, value and {END_PARAMETER} for each argument, and {END_FUNCTION}"
QWEN_XML = CallFormat(
    "qwen xml",
    _read,
    partial(_write, write_word=json_line),
    SHAPE,
    has_bare_values=True,
    marks=(OPEN, FUNCTION),
    described_as="<function=example_function_name>",
)
QWEN_XML_PYTHON = CallFormat(
    "qwen xml, python's words",
    _read,
    partial(_write, write_word=str),
    SHAPE,
    has_bare_values=True,
    marks=(OPEN, FUNCTION),
)
