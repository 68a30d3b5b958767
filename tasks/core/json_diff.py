"""Differences between two JSON values, one line per place, for a terminal.

Values are on one line, shortened, without control characters. If long texts differ far inside, the shown part begins
near the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tasks.core.json_text import json_line
from tasks.core.text import first_few, one_line, printable

MAX_SHOWN = 60  # characters of a value
MAX_NAME = 80  # of the name of a tool, an argument or a field
MAX_LISTED = 8  # names in one line
LEAD = 20  # characters shown before the first difference of two long texts
HASH = re.compile(r"[0-9a-f]{32,}")


def changes(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Lines like `tools.get_cost.version: "1" → "2"`. The order of keys counts: models read schemas in order."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _key_changes(old, new, place)
        for key in old:
            if key in new:
                yield from changes(old[key], new[key], f"{place}.{shown_name(key)}" if place else shown_name(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and any(map(_is_nested, old)):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, f"{place}[{number}]")
    elif not is_same(old, new):
        yield f"{place}: {arrow(old, new)}"


def _key_changes(old: dict[str, Any], new: dict[str, Any], place: str) -> Iterator[str]:
    gone, added = [key for key in old if key not in new], [key for key in new if key not in old]
    renamed = {}
    for key in gone:
        new_name = next((other for other in added if _is_nested(old[key]) and is_same(old[key], new[other])), None)
        if new_name is not None:
            renamed[key] = new_name
            added.remove(new_name)
    phrases = [f"{shown_name(key)} is now called {shown_name(new_name)}" for key, new_name in renamed.items()]
    phrases += [f"{_with_value(key, old[key])} is gone" for key in gone if key not in renamed]
    phrases += [f"{_with_value(key, new[key])} is new" for key in added]
    if phrases:
        yield f"{place or 'environment'}: {listed(phrases)}"
    elif list(old) != list(new):
        yield f"{place or 'environment'}: {order(old, new)}"


def is_same(old: Any, new: Any) -> bool:
    """Equal as JSON, in any order of keys: 1 is neither true nor 1.0."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


def arrow(old: Any, new: Any) -> str:
    """`old → new`, each as JSON on one line; of two hashes nobody reads more than that they differ."""
    if all(isinstance(value, str) and HASH.fullmatch(value) for value in (old, new)):
        return f"{old[:8]}… → {new[:8]}…"
    before, after = json_line(old), json_line(new)
    if max(len(before), len(after)) <= MAX_SHOWN:
        return f"{printable(before)} → {printable(after)}"
    pairs = enumerate(zip(before, after, strict=False))
    same = next((number for number, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, same - LEAD)
    return f"{_cut(before, start)} → {_cut(after, start)}"


def shown_name(key: str) -> str:
    return one_line(key, MAX_NAME)


def order(old: Iterable[str], new: Iterable[str]) -> str:
    pairs = [(before, after) for before, after in zip(old, new, strict=True)]
    same = next(number for number, (before, after) in enumerate(pairs) if before != after)
    before, after = (listed([shown_name(key) for key in keys]) for keys in zip(*pairs[same:], strict=True))
    return f"their order: {before} → {after}"


def listed(phrases: Sequence[str]) -> str:
    return first_few(phrases, MAX_LISTED)


def _with_value(key: str, value: Any) -> str:
    text = printable(json_line(value))
    return f"{shown_name(key)} {text}" if len(text) <= MAX_SHOWN else shown_name(key)


def _cut(text: str, start: int) -> str:
    end = start + MAX_SHOWN
    return f"{'…' if start else ''}{printable(text[start:end])}{'…' if len(text) > end else ''}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)
