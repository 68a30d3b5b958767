"""Bounded parsing of JSON from models, tools and endpoints.

Python parses a thousand levels of nesting and fails when the value is copied, compared or written: a call nested 490
levels deep would end a stage, again on each rerun.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # containers within each other
MAX_ROW_DEPTH = MAX_DEPTH + 16  # of a record, which contains a model's JSON a few levels down


class RepeatedName(ValueError):
    """An object has a name twice: readers differ in which of the values counts."""

    def __init__(self, name: str):
        super().__init__(f"an object has the name {name!r} twice")
        self.name = name


def parse(text: str | bytes, *, max_depth: int = MAX_DEPTH, unique_names: bool = False) -> Any:
    """ValueError if the text is not JSON, is nested too deep, or has a number that no file can contain: NaN, Infinity,
    one beyond a float, or an integer of more than 4,300 digits. With `unique_names` RepeatedName too.
    """
    text = text if isinstance(text, str) else _decoded(text)
    value = _decode(_UNIQUE_DECODER, text, max_depth) if unique_names else _read(text, max_depth)
    if text.count("[") + text.count("{") > max_depth:  # else it cannot be deeper, and most texts are so small
        check_depth(value, max_depth=max_depth)
    return value


def json_line(value: Any) -> str:
    """JSON on one line, with every character as itself, spaced as models and people know it."""
    return _LINE.encode(value)


def json_row(value: Any) -> bytes:
    """JSON of a row in a file: UTF-8 on one line, without spaces, in a quarter of `json`'s time. ValueError for what no
    file can contain: NaN, Infinity, half a surrogate pair.
    """
    import pydantic_core  # here, since `--help` needs none; `from` would cost more than a short row

    try:
        row = pydantic_core.to_json(value)
    except ValueError as error:
        if "surrogates not allowed" not in str(error):
            raise
        raise ValueError("it contains half a surrogate pair, which no file can") from None
    if b"NaN" in row or b"Infinity" in row:
        _STRICT.encode(value)  # which tells the number from the word
    return row


def plain(value: Any) -> Any:
    """The value as a row gives it back: keys are text, tuples lists. ValueError for what is no JSON; NaN stays."""
    import pydantic_core

    try:
        return pydantic_core.to_jsonable_python(value)
    except ValueError as error:
        raise ValueError(f"it contains what is no JSON: {error}") from None


def check_writable(value: Any, *, max_depth: int | None = None) -> None:
    """ValueError for what no file can contain, as `json_row`, and for containers nested deeper."""
    row = json_row(value)
    if max_depth is not None and row.count(b"[") + row.count(b"{") > max_depth:
        check_depth(value, max_depth=max_depth)


def check_depth(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """ValueError if containers are nested deeper than `max_depth`. Iterative, so any depth is safe."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > max_depth:
            raise ValueError(f"nested deeper than {max_depth} levels")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _read(text: str, max_depth: int) -> Any:
    """By pydantic, in a third of `json`'s time; what that refuses or reads otherwise, by `json`."""
    import pydantic_core

    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
        if b"Infinity" not in pydantic_core.to_json(value):  # which it makes of a number beyond a float
            return value
    except (ValueError, TypeError):  # TypeError: half a surrogate pair, which `json` reads
        pass
    return _decode(_DECODER, text, max_depth)


def _decode(decoder: json.JSONDecoder, text: str, max_depth: int) -> Any:
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth} levels") from None


def with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, for a decoder. RepeatedName if it has a name twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for name in names if names.count(name) > 1))
    return made


def _decoded(text: bytes) -> str:
    return text.decode(json.detect_encoding(text), "surrogatepass")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not a JSON number")
    return value


# Made once: `json.dumps` and `json.loads` make one a call where anything differs from their defaults, in 3 µs.
_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
_UNIQUE_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, object_pairs_hook=with_unique_names)
_LINE = json.JSONEncoder(ensure_ascii=False)
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
