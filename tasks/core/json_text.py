"""JSON of models, tools and endpoints, read within bounds.

Python reads a thousand levels of nesting and then fails where the value is next copied, compared or written: a call
nested 490 deep would end a stage, on each rerun again.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # containers within each other
MAX_ROW_DEPTH = MAX_DEPTH + 16  # of a record, which contains what a model wrote a few levels down


def parse(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text. ValueError where it is none, is nested too deep, or has a number that no file can have:
    NaN, Infinity, one beyond a float, or an integer of more than 4,300 digits.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth} levels") from None
    check_depth(value, max_depth=max_depth)
    return value


def check_depth(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """ValueError where containers are nested deeper than `max_depth`; level by level, so that any depth is measured."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > max_depth:
            raise ValueError(f"nested deeper than {max_depth} levels")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number that JSON has")
    return value
