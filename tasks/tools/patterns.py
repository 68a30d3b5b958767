"""The patterns of a JSON Schema, each held against its own texts in bounded time.

A pattern comes from a server and may be hostile. So each gets the first engine below that can run it, which has a limit
for one text: linear; linear for a pattern that is large when compiled; backtracking, for one that looks around or back.
All texts of a call together may be four times as long. A pattern that only repeats one character is read as what that
character may be, and a length: compiled, its repeats would be copies.

Left out: `patternProperties`, whose patterns are held against names of arguments (`schemas.py`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_PATTERN_BYTES = 1 << 20  # of a compiled pattern
MAX_LARGE_BYTES = 1 << 22
MAX_MATCHED = 200_000  # characters of a text: linear, times the size of the pattern
MAX_MATCHED_BY_LARGE = 10_000  # the same 0.2 s
MAX_BACKTRACKED = 4_000  # the same where time is quadratic: 0.1 s
MAX_BACKTRACKS = 100_000
MAX_TEXTS = 4  # of the longest that a pattern is held against, in one call
KEYWORD = "x-turnwise-pattern"
AS_THEY_ARE = ("const", "enum")  # values, in which `pattern` is no keyword
NAMED = ("properties", "patternProperties", "dependentSchemas")  # contain schemas by arbitrary names
DEFINITIONS = ("$defs", "definitions")  # contain those too, used only by reference
ONE_CHARACTER = re.compile(r"\^(\.|\\[dDsSwW]|\[(?:[^\[\]\\]|\\.)+\])\{(\d{1,9})(,?)(\d{0,9})\}\$")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern; `max_characters` of a text that it is held against, and the lengths that a match may have."""

    source: str
    max_characters: int
    compiled: Any
    min_length: int = 0
    max_length: int | None = None

    def matches(self, text: str) -> bool:
        has_length = self.min_length <= len(text) and (self.max_length is None or len(text) <= self.max_length)
        return has_length and bool(self.compiled.is_valid(text))


@lru_cache(maxsize=1000)
def compile_pattern(source: str) -> Pattern:
    """ValueError if it is no pattern, or too large to check."""
    repeated = ONE_CHARACTER.fullmatch(source)
    if repeated is None:
        return Pattern(source, *_compiled(source))
    character, least, comma, most = repeated.groups()
    max_length = int(most) if most else None if comma else int(least)
    return Pattern(source, *_compiled(f"^{character}*$"), int(least), max_length)


def _compiled(source: str) -> tuple[int, Any]:
    """(most characters of a text, validator of a text) in the first engine that can run the pattern."""
    import jsonschema_rs

    def linear(size: int) -> Any:
        return jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=size)

    size = {"size_limit": MAX_PATTERN_BYTES, "dfa_size_limit": MAX_PATTERN_BYTES}
    for max_characters, engine in (
        (MAX_MATCHED, linear(MAX_PATTERN_BYTES)),
        (MAX_MATCHED_BY_LARGE, linear(MAX_LARGE_BYTES)),
        (MAX_BACKTRACKED, jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS, **size)),
    ):
        try:
            return max_characters, jsonschema_rs.validator_for({"pattern": source}, pattern_options=engine)
        except jsonschema_rs.ValidationError:
            continue
    raise ValueError(f"{json.dumps(source)} is not a pattern that can be checked in bounded time")


class PatternKeyword:
    """What a validator calls in place of `pattern`."""

    def __init__(self, _schema: Mapping[str, Any], source: str, _path: list[Any]):
        self.pattern = compile_pattern(source)

    def validate(self, instance: Any) -> None:
        """ValueError where it does not match."""
        if not isinstance(instance, str) or (_effort.admits(instance, self.pattern) and self.pattern.matches(instance)):
            return
        raise ValueError(f'{json.dumps(instance, ensure_ascii=False)} does not match "{self.pattern.source}"')


class _Effort(threading.local):
    """What was matched in the call under way: `share` of the longest text, `limit` where one was too long."""

    share, limit = 0.0, 0

    def admits(self, text: str, pattern: Pattern) -> bool:
        self.share += len(text) / pattern.max_characters
        if len(text) > pattern.max_characters or self.share > MAX_TEXTS:
            self.limit = pattern.max_characters
        return not self.limit


_effort = _Effort()


@contextmanager
def bounded_matching() -> Iterator[_Effort]:
    """Inside, one call is checked; `limit` of what is given is not 0 if it has too much text for its patterns."""
    _effort.share, _effort.limit = 0.0, 0
    yield _effort


def with_keyword(schema: Any) -> Any:
    """The schema with each `pattern` as our keyword."""
    if isinstance(schema, list):
        return [with_keyword(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        KEYWORD if name == "pattern" and isinstance(value, str) else name: _part_with_keyword(name, value)
        for name, value in schema.items()
    }


def _part_with_keyword(name: str, value: Any) -> Any:
    if name in AS_THEY_ARE:
        return value
    if name in (*NAMED, *DEFINITIONS) and isinstance(value, Mapping):
        return {own: with_keyword(schema) for own, schema in value.items()}
    return with_keyword(value)
