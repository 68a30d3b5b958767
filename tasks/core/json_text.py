"""JSON that somebody else wrote, read within bounds: every parser of what a model, a tool or an endpoint says uses it.

Python reads a thousand levels of nesting and then fails wherever a value is next copied, compared or written: a call
nested 490 deep would end a stage, and end it again on each rerun. So what comes in is bounded here, once.
Left out: what the value should be.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # containers within each other
MAX_ROW_DEPTH = MAX_DEPTH + 16  # of a record, which holds what a model wrote a few levels down


def parse(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text. ValueError where it is none, or is nested too deep, or holds a number that no file can:
    NaN, Infinity, one beyond a float, or an integer of more than 4,300 digits.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth} levels") from None
    check_depth(value, max_depth=max_depth)
    return value


def check_depth(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """ValueError where containers lie within each other more than `max_depth` deep. Level by level, so that no depth is
    too deep to be measured.
    """
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
