"""Reflexion beside RL at an equal number of episodes, on the chart; two seeds, minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.reflexion import measure

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [7, 8])
def test_reflexion_has_as_many_episodes_as_reinforcement_learning(tmp_path: Path, seed: int) -> None:
    """16 iterations of 128 episodes, over 80 test problems: 25 attempts each, that end with the first success."""
    row = measure(tmp_path, seed)
    print({name: row[name] for name in ("seed", "episodes", "success_within")})
    episodes = row["episodes"]
    assert row["num_attempts"] == 25
    assert episodes["reflexion"] <= episodes["reflexion_at_most"] == 2000 <= episodes["rl_training"] == 2048
    assert row["best"]["success_rate"] > row["success_within"][0]["reflexion"]
    assert (tmp_path / str(seed) / "progress.png").stat().st_size > 10_000
