"""Success in this example: the memory holds what the user said and nothing else, and the answer names the person."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.core.records import Problem


def remembered(
    problem: Problem, calls: Sequence[Mapping[str, Any]], final_message: str | None, call_tool: Callable[..., str]
) -> dict[str, bool]:
    """Two checks, by the server's own `read_graph`: which calls led there does not matter."""
    graph = json.loads(call_tool("read_graph", {}))
    return {
        "memory": in_any_order(graph) == in_any_order(problem.world["graph"]),
        "answer": problem.world["name"] in (final_message or ""),
    }


def in_any_order(graph: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    entities = [(item["name"], item["entityType"], sorted(item["observations"])) for item in graph["entities"]]
    relations = [(item["from"], item["relationType"], item["to"]) for item in graph["relations"]]
    return sorted(entities), sorted(relations)
