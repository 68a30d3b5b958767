"""Which checks of a decision passed, for every page and list that shows them with a sign."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Way = Literal["better", "cheaper"]
WAYS: tuple[Way, ...] = ("better", "cheaper")  # one of them is enough; every other check must pass
SIGNS = {"passed": "✓", "failed": "✗", "needless": "–"}
WORDS = {"passed": "passed", "failed": "not passed", "needless": "not needed"}


def marks_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each check and its sentence: passed, failed, or needless (a closed way while the other is open)."""
    checks = row.get("checks", ())  # a record from before there were any has none
    is_open = any(check["passed"] for check in checks if check["name"] in WAYS)

    def mark(check: Mapping[str, Any]) -> str:
        if check["passed"]:
            return "passed"
        return "needless" if check["name"] in WAYS and is_open else "failed"

    return [(mark(check), check["sentence"]) for check in checks]
