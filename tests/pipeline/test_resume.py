"""A training run that is killed with kill -9 at a random moment ends bitwise as one that never was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import tiny
from tests.pipeline.kill_points import killed_and_resumed, whole_run

pytestmark = pytest.mark.flow
NUM_POINTS = 1  # make bench has twenty


def test_a_run_killed_at_a_random_point_ends_bitwise_the_same(tmp_path: Path) -> None:
    start = tiny.model_folder(tmp_path / "start")
    whole = whole_run(start, tmp_path / "whole")
    rng = random.Random(3)
    for number in range(NUM_POINTS):
        result, _ = killed_and_resumed(start, tmp_path / f"killed-{number}", whole, rng)
        assert result == whole.hash
