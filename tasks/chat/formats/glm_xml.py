"""GLM's tags: the tool's name, then pairs of tags for keys and bare values; on lines of their own up to GLM 4.6.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>value</arg_value>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.tags import bare_text
from tasks.core.records import ToolCall
from tasks.core.tool_calls import CLOSE, OPEN, parse_calls

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read_call(body: str) -> ToolCall | None:
    name, key, pairs = body.partition(KEY)
    arguments = _read_pairs(key + pairs)
    if not name.strip() or "<" in name or arguments is None:
        return None
    return ToolCall.model_construct(name=name.strip(), arguments=arguments)


def _read_pairs(text: str) -> dict[str, str] | None:
    """Each value goes up to the first tag that ends one; None where something else is between the pairs."""
    arguments = dict[str, str]()
    *pairs, rest = text.split(END_VALUE)
    for pair in pairs:
        key, ended, value = pair.partition(END_KEY)
        before, opened, bare = value.partition(VALUE)
        if not key.lstrip().startswith(KEY) or not ended or before.strip() or not opened:
            return None
        arguments[key.lstrip().removeprefix(KEY)] = bare
    return arguments if not rest.strip() else None


def _write(calls: Sequence[ToolCall], *, gap: str) -> str:
    return "\n".join(_write_call(call, gap) for call in calls)


def _write_call(call: ToolCall, gap: str) -> str:
    pairs = "".join(
        f"{KEY}{name}{END_KEY}{gap}{VALUE}{bare_text(value, OPEN, CLOSE, END_VALUE)}{END_VALUE}{gap}"
        for name, value in call.arguments.items()
    )
    return f"{OPEN}{call.name}{gap}{pairs}{CLOSE}"


SHAPE = "a call is the tool's name, and for each argument its key in tags arg_key and its value in tags arg_value"
_read = partial(parse_calls, parse=_read_call)
GLM_XML = CallFormat("glm xml", _read, partial(_write, gap="\n"), SHAPE, has_bare_values=True, marks=(OPEN,))
GLM_XML_ONE_LINE = CallFormat(
    "glm xml, one line", _read, partial(_write, gap=""), SHAPE, has_bare_values=True, marks=(OPEN,)
)
