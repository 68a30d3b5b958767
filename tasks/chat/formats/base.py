"""What a call format is: how calls are read from a message and written into one.

A model is asked in the form it was trained on: a form it must guess costs the success that RL starts from. Model text
is data: JSON or bare text, never evaluated. An unreadable call is None, which the environment answers; no text raises,
and reading takes time in proportion to its length. Stored demonstrations contain Hermes text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.chat.formats.bare_values import type_arguments
from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import SHAPE, parse_calls

Calls = list[ToolCall | None]
Tools = Sequence[dict[str, Any]]  # as schemas in prompts


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`read` is None for each malformed call, empty for a closing message. `answer` is the inverse of `closing`.

    `has_bare_values`: what is read is text, and only the tool's schema says of which type. `described_as`: what the
    prompt of a template contains that explains this format. `escapes`: letters beyond ASCII are written as codes.
    `marks`: what the first call of a message may begin with; empty where a message with calls says nothing beside them.
    `shape` tells a model what a call is; it names no control token, which would be broken up in a reply.
    """

    name: str
    read: Callable[[str], Calls]
    write: Callable[[Sequence[ToolCall]], str]
    shape: str
    closing: Callable[[str], str] = str
    answer: Callable[[str], str] = str
    has_bare_values: bool = False
    described_as: str | None = None
    escapes: bool = False
    marks: tuple[str, ...] = ()

    def calls(self, text: str, tools: Tools = ()) -> Calls:
        calls = self.read(text)
        return type_arguments(calls, tools) if self.has_bare_values else calls

    def prose(self, text: str) -> str:
        """What a message with calls says before them."""
        for mark in self.marks:
            text = text.partition(mark)[0]
        return text.strip() if self.marks else ""

    def text(self, calls: Sequence[ToolCall]) -> str:
        written = self.write(calls)
        return "".join(map(_escape, written)) if self.escapes else written

    def rewrite(self, stored: str) -> str:
        """A stored assistant text (Hermes) as a model of this format writes it."""
        if self.read is parse_calls and not self.escapes:
            return stored
        calls = [call for call in parse_calls(stored) if call is not None]
        return self.text(calls) if calls else self.closing(stored)

    def reword(self, reply: str) -> str:
        """A tool's reply to a malformed call, which says what a call of Hermes is, to a model of this format."""
        return reply.replace(_in_json(SHAPE), _in_json(self.shape)).replace(SHAPE, self.shape)

    def escaping(self) -> CallFormat:
        return replace(self, escapes=True)


def _escape(letter: str) -> str:
    return letter if letter.isascii() else json.dumps(letter)[1:-1]


def _in_json(text: str) -> str:
    return json_line(text)[1:-1]


def next_json(text: str, position: int, gap: re.Pattern[str]) -> tuple[Any, int] | None:
    """The JSON value after a gap at `position`, and where the gap after it ends; None where there is none.

    An error costs a scan of the text before it, so a reader stops at the first one.
    """
    try:
        value, end = json.JSONDecoder().raw_decode(text, end_of_gap(text, position, gap))
    except (ValueError, RecursionError):
        return None
    return value, end_of_gap(text, end, gap)


def end_of_gap(text: str, position: int, gap: re.Pattern[str]) -> int:
    found = gap.match(text, position)
    return found.end() if found else position
