"""One check of the promotion policy with its result, and how its sentences write numbers."""

from __future__ import annotations

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
