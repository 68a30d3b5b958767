"""Which versions were the anchor, the champion that a cheaper one may not fall below, by the journal. Pure.

The first champion is the anchor. One that was shown to be better than the anchor is the next, and any other leaves it
as it is: the entry of a promotion says which (`anchor`: the version that stays it; None where this champion is it).
A version that was rolled back is no yardstick any more. Entries from before anchors were kept say nothing, and the last
champion they name is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tasks.tracking.journal import Entry

ANCHOR = "anchor"  # in the body of a promotion


def anchor_event(stays: int | None) -> dict[str, Any]:
    """What the entry of a promotion says: the version that stays the anchor, None where the new champion is it."""
    return {ANCHOR: stays}


def anchors(entries: Iterable[Entry]) -> list[int]:
    """The versions that were the anchor and not rolled back, the present one last."""
    path: list[int] = []
    for entry in entries:
        body, champion = entry.body, entry.body.get("champion")
        if body.get("anew"):
            path = []
        if entry.kind == "rollback":
            undone = body.get("undone") or [body.get("instead_of")]
            path = [version for version in path if version not in undone]
        if champion is None or entry.kind not in ("promotion", "rollback", "adoption"):
            continue
        is_anchor = not path if entry.kind != "promotion" else body.get(ANCHOR) is None
        if is_anchor and entry.kind == "promotion" and ANCHOR not in body:
            path = []  # nobody knows whether it was better than those before
        if is_anchor:
            path = [*(version for version in path if version != champion), champion]
    return path
