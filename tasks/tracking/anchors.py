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
        if entry.kind == "promotion" and ANCHOR not in body:
            path = [champion]  # nobody knows whether it was better than those before
            continue
        stays = body.get(ANCHOR) if entry.kind == "promotion" else (path[-1] if path else None)
        anchor = champion if stays is None else stays  # not always the last: that may have been deleted
        path = [*(version for version in path if version != anchor), anchor]
    return path
