"""What episodes of a model behind an endpoint used: requests, tokens and cost. What was not measured (tokens that the
endpoint did not count, cost without a price) is null, never 0.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict

from tasks.core.records import Trajectory


class Usage(TypedDict):
    """Means over all episodes played, dropped ones included: they were paid for. Cost is in the prices' currency."""

    requests: float
    input_tokens: float | None
    output_tokens: float | None
    cost: float | None


def mean_usage(trajectories: list[Trajectory]) -> Usage:
    """Per episode; rounded to 6 digits, the cost to 8."""
    rows = [trajectory.details["usage"] for trajectory in trajectories]
    return {
        "requests": round(math.fsum(row["num_requests"] for row in rows) / len(rows), 6),
        "input_tokens": _mean(rows, "input_tokens", digits=6),
        "output_tokens": _mean(rows, "output_tokens", digits=6),
        "cost": _mean(rows, "cost", digits=8),
    }


def _mean(rows: list[dict[str, Any]], name: str, *, digits: int) -> float | None:
    values = [row[name] for row in rows]
    return None if None in values else round(math.fsum(values) / len(values), digits)
