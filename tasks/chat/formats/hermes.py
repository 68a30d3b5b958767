"""Hermes: JSON between `<tool_call>` tags, of Qwen 2.5, Qwen 3 and Hermes models."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.tags import escape_tags
from tasks.core.records import ToolCall
from tasks.core.tool_calls import CLOSE, OPEN, SHAPE, call_text, parse_calls


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(map(_write_call, calls))


def _write_call(call: ToolCall) -> str:
    body = call_text(call).removeprefix(OPEN).removesuffix(CLOSE)
    return f"{OPEN}{escape_tags(body, OPEN, CLOSE)}{CLOSE}"


HERMES = CallFormat("hermes", parse_calls, _write, SHAPE, described_as=OPEN, marks=(OPEN,))
