"""Does drawing from the band take fewer episodes than uniform, until the hardest level of travel_desk is solved?

Three seeds of each sampler and mix from one warm start, about three hours of one core; infra/benchmarks.md has what was
measured. Nothing is asserted of who wins: the numbers are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.curriculum import INTERVAL, ITERATIONS, SAMPLERS, TARGETS, episodes_until, prepare
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(14_400)]
SEEDS = (1, 2, 3)


@pytest.mark.parametrize("mix", TARGETS)
def test_episodes_until_the_hardest_level_is_solved(mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prepare(tmp_path)
    for sampler in SAMPLERS:
        for seed in SEEDS:
            command = [sys.executable, "-m", "tests.benchmarks.curriculum", str(tmp_path), mix, sampler, str(seed)]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            reached = episodes_until(rows, TARGETS[mix])
            told = f"{reached:,} episodes" if reached else f"not in {rows[-1]['episodes']:,} episodes"
            print(f"\n{mix}, {sampler}, seed {seed}: {told}, {rows[-1]['hardest']:.1%} at the end")
            assert rows[0]["hardest"] < TARGETS[mix]
            assert reached is not None or rows[-1]["iteration"] == ITERATIONS - ITERATIONS % INTERVAL
