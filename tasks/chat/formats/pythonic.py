"""Pythonic calls, `[f(a=1, b="x")]`: of Llama 3.2 and 4 without more, of LFM 2.5 between tags.

Only literals are values, read by the rules below and never by Python, whose parser can be made to fill the memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tasks.chat.formats.base import CallFormat, Calls
from tasks.core import json_text
from tasks.core.json_text import MAX_DEPTH, json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call

MAX_CHARACTERS = 200_000  # of one message: more takes a second to read
OPENINGS = ("<|tool_call_start|>", "<|python_start|>", "<|python_tag|>")
CLOSINGS = ("<|tool_call_end|>", "<|python_end|>")
OPENS_A_CALL = re.compile(r"\s*\[\s*[^\W\d][\w.-]*\s*\(")
TOKEN = re.compile(
    r"""\s*(?:(?P<string>'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+")"""
    r"""|(?P<number>-?\d[\w.]*(?:(?<=[eE])[+-]\d+)?)|(?P<word>[^\W\d][\w.-]*)|(?P<mark>[][(){},:=]))""",
    re.DOTALL,
)
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}


def _read(text: str) -> Calls:
    tag = next((tag for tag in OPENINGS if tag in text), "")
    body = text.partition(tag)[2] if tag else text
    if not tag and not OPENS_A_CALL.match(body):
        return []
    calls: Calls = []
    try:
        if len(body) > MAX_CHARACTERS:
            raise ValueError("too long")
        _read_calls(_Tokens(body), calls)
    except ValueError:
        return [*calls, None]
    return calls


class _Tokens:
    """The tokens of a text, one at a time; ValueError where none begins."""

    def __init__(self, text: str):
        self.text, self.end = text, 0
        self.step()

    def step(self) -> None:
        found = TOKEN.match(self.text, self.end)
        self.kind, self.token = (str(found.lastgroup), found[found.lastgroup or 0]) if found else ("", "")
        self.start, self.end = self.end, found.end() if found else self.end

    def has(self, mark: str) -> bool:
        """Whether the next token is this one, which is then read."""
        if self.kind != "mark" or self.token != mark:
            return False
        self.step()
        return True

    def expect(self, mark: str) -> None:
        if not self.has(mark):
            raise ValueError(f"{mark} is missing")

    def take(self, *kinds: str) -> str:
        if self.kind not in kinds:
            raise ValueError("another token")
        token = self.token
        self.step()
        return token

    @property
    def rest(self) -> str:
        return self.text[self.start :].strip()


def _read_calls(tokens: _Tokens, calls: Calls) -> None:
    tokens.expect("[")
    while not tokens.has("]"):
        name, arguments = tokens.take("word"), dict[str, Any]()
        tokens.expect("(")
        while not tokens.has(")"):
            key = tokens.take("word")
            tokens.expect("=")
            arguments[key] = _read_value(tokens, depth=1)
            _expect_comma_or(")", tokens)
        calls.append(as_call({"name": name, "arguments": arguments}))
        _expect_comma_or("]", tokens)
    if not calls or (tokens.rest and not tokens.rest.startswith(CLOSINGS)):
        raise ValueError("no calls, or more than calls")


def _expect_comma_or(end: str, tokens: _Tokens) -> None:
    if not tokens.has(",") and (tokens.kind, tokens.token) != ("mark", end):
        raise ValueError("a comma is missing")


def _read_value(tokens: _Tokens, *, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if tokens.has("["):
        return _read_list(tokens, "]", depth)
    if tokens.has("("):
        return _read_list(tokens, ")", depth)
    if tokens.has("{"):
        return _read_object(tokens, depth)
    kind, token = tokens.kind, tokens.take("string", "number", "word")
    if kind == "string":
        return _unquote(token)
    if kind == "number":
        return json_text.parse(token)
    if token not in CONSTANTS:
        raise ValueError("a name is no value")
    return CONSTANTS[token]


def _read_list(tokens: _Tokens, end: str, depth: int) -> list[Any]:
    values = []
    while not tokens.has(end):
        values.append(_read_value(tokens, depth=depth + 1))
        _expect_comma_or(end, tokens)
    return values


def _read_object(tokens: _Tokens, depth: int) -> dict[str, Any]:
    values = {}
    while not tokens.has("}"):
        key = _unquote(tokens.take("string"))
        tokens.expect(":")
        values[key] = _read_value(tokens, depth=depth + 1)
        _expect_comma_or("}", tokens)
    return values


def _unquote(token: str) -> str:
    text = ESCAPE.sub(_unescape, token[1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # \ud83d\ude00 is one letter, half of it an error


def _unescape(found: re.Match[str]) -> str:
    """What a backslash and what follows it are; a backslash that escapes nothing is itself, as in Python."""
    code = found[1]
    if len(code) == 1:
        return LETTERS.get(code, f"\\{code}")
    if (number := int(code[1:], 16)) > sys.maxunicode:
        raise ValueError("beyond the last letter")
    return chr(number)


def _write(
    calls: Sequence[ToolCall], *, write_value: Callable[[Any], str], opening: str = "", closing: str = ""
) -> str:
    return f"{opening}[{', '.join(_write_call(call, write_value) for call in calls)}]{closing}"


def _write_call(call: ToolCall, write_value: Callable[[Any], str]) -> str:
    return f"{call.name}({', '.join(f'{key}={write_value(value)}' for key, value in call.arguments.items())})"


def _as_python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_as_python(key)}: {_as_python(item)}' for key, item in value.items())}}}"
    return repr(value) if value is None or isinstance(value, bool) else _as_json(value)


def _as_lfm(value: Any) -> str:
    """Text in single quotes; lists and objects are JSON."""
    if isinstance(value, str):
        return "'" + _as_json(value)[1:-1].replace(r"\"", '"').replace("'", r"\'") + "'"
    return _as_json(value) if isinstance(value, list | dict) else _as_python(value)


def _as_json(value: Any) -> str:
    """JSON's escapes are also Python's; the tags that end a call are escaped, as data must not end it."""
    return json_line(value).replace("<|", r"\u003c|")


SHAPE = "calls are one list of Python, such as [name(key='text', other=5)]"
PYTHONIC = CallFormat("pythonic", _read, partial(_write, write_value=_as_python), SHAPE, described_as="[func_name1(")
LFM_PYTHONIC = CallFormat(
    "pythonic in tags", _read, partial(_write, write_value=_as_lfm, opening=OPENINGS[0], closing=CLOSINGS[0]), SHAPE
)
