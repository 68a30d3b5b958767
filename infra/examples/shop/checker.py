"""Success in this example: the shelf holds what the problem wants, and nothing else has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.core.records import Problem


def filled(
    problem: Problem, calls: Sequence[Mapping[str, Any]], final_message: str | None, call_tool: Callable[..., str]
) -> bool:
    """By the server's own `shelf`: which calls led there does not matter."""
    return bool(json.loads(call_tool("shelf", {})) == problem.world["filled"])
