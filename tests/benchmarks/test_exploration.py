"""The options of exploration and credit, each against training as usual; two seeds, minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.exploration import VARIANTS, measure

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [7, 8])
def test_every_option_trains_to_more_than_the_warm_start(tmp_path: Path, seed: int) -> None:
    rows = list(measure(tmp_path, seed))
    print(*rows, sep="\n")
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert [row["variant"] for row in rows if "stopped_at" in row] in ([], ["as usual, one update"])
    assert all(row["last_quarter"] > row["first"] for row in rows if "stopped_at" not in row)
