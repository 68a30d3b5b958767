"""What episodes behind an endpoint took, on average, and what is said where nobody counted."""

from __future__ import annotations

from typing import Any

from tasks.core.records import Trajectory
from tasks.measurement.usage import mean_usage
from tests.measurement.synthetic import trajectory


def took(num_requests: int, input_tokens: int | None, output_tokens: int | None, cost: float | None) -> Trajectory:
    made = trajectory()
    usage: dict[str, Any] = {"num_requests": num_requests, "input_tokens": input_tokens, "output_tokens": output_tokens}
    made.details = {"usage": {**usage, "cost": cost}}
    return made


def test_usage_is_the_mean_over_all_episodes():
    """(1 + 3) / 2 requests, (10 + 40) / 2 tokens read, (1 + 2) / 2 written, (0.01 + 0.02) / 2 paid."""
    mean = mean_usage([took(1, 10, 1, 0.01), took(3, 40, 2, 0.02)])
    assert mean == {"requests": 2.0, "input_tokens": 25.0, "output_tokens": 1.5, "cost": 0.015}


def test_one_episode_nobody_counted_leaves_no_mean():
    mean = mean_usage([took(1, 10, 1, 0.01), took(1, None, None, None)])
    assert mean == {"requests": 1.0, "input_tokens": None, "output_tokens": None, "cost": None}
