"""Qwen3-Coder's tags, also of Qwen 3.5 and later and of Nemotron 3: each value is bare text between parameter tags.

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.chat.formats.base import CallFormat, Calls
from tasks.chat.formats.tags import bare_text
from tasks.core.records import ToolCall
from tasks.core.tool_calls import CLOSE, OPEN, between_tags

FUNCTION, END_FUNCTION, END_PARAMETER = "<function=", "</function>", "</parameter>"
PARAMETER = re.compile(r"\s*<parameter=([^>]*)>")


def _read(text: str) -> Calls:
    bodies, is_whole = between_tags(text, OPEN, CLOSE)
    calls = [_read_call(body.strip()) for body in bodies]
    return calls if is_whole else [*calls, None]


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


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(map(_write_call, calls))


def _write_call(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{bare_text(value, OPEN, CLOSE, END_PARAMETER)}\n{END_PARAMETER}\n"
        for name, value in call.arguments.items()
    )
    return f"{OPEN}\n{FUNCTION}{call.name}>\n{parameters}{END_FUNCTION}\n{CLOSE}"


QWEN_XML = CallFormat("qwen xml", _read, _write, has_bare_values=True, described_as="<function=example_function_name>")
