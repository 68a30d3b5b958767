"""Six seeds of the demo's warm start, none of which leaves RL with nothing to learn from; 10 minutes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.demo import demo_params
from tests.benchmarks.warm_starts import measure

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
SEEDS = (11, 23, 7, 1, 2, 3)


@pytest.mark.parametrize("num_steps", [700, 250])
def test_no_seed_ends_below_what_reinforcement_learning_needs(tmp_path: Path, num_steps: int) -> None:
    """With the demo's steps, and with so few that the first attempt alone is not enough."""
    needed = demo_params()["assess"]["warm_start_below"]
    for seed in SEEDS:
        found = measure(tmp_path, seed, num_steps=num_steps)
        print(found)
        assert max(attempt["success"] for attempt in found["attempts"]) >= needed
