"""Records as rows of a file: what says nothing is left out."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

LEFT_OUT_IF_EMPTY = ("score", "num_replayed_turns", "token_versions", "begun")


def without_empty(row: dict[str, Any]) -> dict[str, Any]:
    for name in LEFT_OUT_IF_EMPTY:
        if name in row and not row[name]:
            del row[name]
    return row


def row_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, not copied."""
    names, values = _fields(type(record))  # type: ignore[arg-type]  # classes are hashable
    return dict(zip(names, values(record), strict=True))


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    """Names of a record's fields, and what gets them all at once, which is quicker than one by one."""
    names = tuple(kind.__dataclass_fields__)
    return names, attrgetter(*names)
