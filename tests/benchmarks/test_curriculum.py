"""Does drawing from the band take fewer episodes than uniform, until the hardest level of travel_desk is solved?

Three seeds of each sampler and pool from one warm start, about an hour of one core; infra/benchmarks.md has what was
measured. Nothing is asserted of who wins: the numbers are printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.curriculum import INTERVAL, ITERATIONS, SAMPLERS, TARGETS, episodes_until, prepare, train

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7_200)]
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curriculum")
    prepare(folder)
    return folder


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("pool", TARGETS)
def test_episodes_until_the_hardest_level_is_solved(pool: str, sampler: str, start: Path) -> None:
    for seed in SEEDS:
        rows = list(train(start, pool, sampler, seed))
        reached = episodes_until(rows, TARGETS[pool])
        told = f"{reached:,} episodes" if reached else f"not in {rows[-1]['episodes']:,} episodes"
        print(f"\n{pool}, {sampler}, seed {seed}: {told}, {rows[-1]['hardest']:.1%} at the end")
        assert rows[0]["hardest"] < TARGETS[pool]
        assert reached is not None or rows[-1]["iteration"] == ITERATIONS - ITERATIONS % INTERVAL
