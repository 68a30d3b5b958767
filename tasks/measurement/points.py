"""How texts write differences of two shares, in percentage points, and how sure they are. A `%` is a share or a
relative change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def points(difference: float) -> str:
    """0.357 is `+35.7`."""
    return f"{100 * difference:+.1f}"


def points_text(size: float) -> str:
    """A bound on a difference, or the size of one: 0.05 is `5.0 points`."""
    return f"{100 * size:.1f} points"


def interval_text(row: Mapping[str, Any]) -> str:
    """`+29.1 to +39.9`."""
    return f"{points(row['ci_low'])} to {points(row['ci_high'])}"


def level_text(confidence: float) -> str:
    """`95%`, or `99.2%` where a whole number is not exact."""
    return f"{100 * confidence:.4g}%"


def difference_text(row: Mapping[str, Any]) -> str:
    """`+12.0 (+3.1 to +20.9)`."""
    return f"{points(row['difference'])} ({interval_text(row)})"
