"""Mistakes that pydantic finds, in the words of params.yaml.

For a value that may be of several kinds pydantic lists a mistake for each, under its own name of that kind; here it is
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Place = tuple[Any, ...]  # of a key, as pydantic gives it
# By pydantic's name of the mistake.
EXPECTED = {"dict_type": "a mapping, such as {name: value}", "list_type": "a list", "float_type": "a number"}


def join_alternatives(items: Sequence[Any]) -> list[Any]:
    """One item for a value that is neither a word such as `auto` nor what else it may be."""
    places = {item["loc"][:-1] for item in items if item["loc"] and str(item["loc"][-1]).startswith("literal[")}
    groups: dict[Place, list[Any]] = {}
    for number, item in enumerate(items):
        place = next((place for place in places if item["loc"][: len(place)] == place), (number,))
        groups.setdefault(place, []).append(item)
    return [_join(group, place) if place in places else group[0] for place, group in groups.items()]


def _join(items: Sequence[Any], place: Place) -> Any:
    return {
        **items[0],
        "type": "literal_error",
        "loc": place,
        "msg": f"Input should be {' or '.join(map(_expected, items))}",
    }


def _expected(item: Any) -> str:
    """What a value should be, in YAML's words."""
    if item["type"] == "greater_than":
        return f"a number above {item['ctx']['gt']:g}"
    return EXPECTED.get(item["type"], item["msg"].removeprefix("Input should be "))


def explain_kind(item: Any) -> str:
    expected = EXPECTED.get(item["type"])
    return f"Input should be {expected}" if expected else str(item["msg"])
