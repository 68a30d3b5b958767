"""kill -9 at twenty random points of a short run: each one resumed, each result compared bitwise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import tiny
from tests.pipeline.kill_points import killed_and_resumed, whole_run

pytestmark = pytest.mark.bench
NUM_POINTS = 20


def test_twenty_kills_leave_no_trace(tmp_path: Path) -> None:
    start = tiny.model_folder(tmp_path / "start")
    whole = whole_run(start, tmp_path / "whole")
    rng = random.Random(20)
    results = [killed_and_resumed(start, tmp_path / f"killed-{n}", whole, rng) for n in range(NUM_POINTS)]
    print(f"\nresumed from checkpoints {sorted(step for _, step in results)} of 20 iterations")
    assert [result == whole.hash for result, _ in results] == [True] * NUM_POINTS
