"""One check of the promotion policy with its result, and how its sentences write numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """`speaks_against`: it failed, and more evidence would hardly change that."""

    name: str
    passed: bool
    speaks_against: bool
    sentence: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def points(difference: float) -> str:
    """A difference of two shares in percentage points: 0.357 is `+35.7`. A `%` is a share or a relative change."""
    return f"{100 * difference:+.1f}"


def points_text(size: float) -> str:
    """A bound on a difference, or the size of one: 0.05 is `5.0 points`."""
    return f"{100 * size:.1f} points"


def interval_text(row: Mapping[str, Any]) -> str:
    """`+29.1 to +39.9`, in percentage points."""
    return f"{points(row['ci_low'])} to {points(row['ci_high'])}"


def level_text(confidence: float) -> str:
    """`95%`, or `99.2%` where a whole number is not exact."""
    return f"{100 * confidence:.4g}%"
