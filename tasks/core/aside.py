"""Names of folders for what is moved aside: `replaced-1`, `replaced-2` and so on."""

from __future__ import annotations

from pathlib import Path


def name_aside(parent: Path, name: str) -> Path:
    """A number above every one that is there, since a person may have cleared some."""
    tails = (item.name.removeprefix(f"{name}-") for item in parent.glob(f"{name}-*"))
    return parent / f"{name}-{max((int(tail) for tail in tails if tail.isdecimal()), default=0) + 1}"
