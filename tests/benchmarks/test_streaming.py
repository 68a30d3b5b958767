"""With slow tools, groups that stream make the trainer wait less than batches collected in turn or ahead do.

Wants two cores to itself. Writes artifacts/bench/streaming.json. Success is compared by
`python -m tests.benchmarks.streaming` over seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import write_json
from tests.benchmarks.streaming import measure
from tests.conftest import ROOT

pytestmark = pytest.mark.bench


def test_the_trainer_waits_least_where_groups_stream(tmp_path: Path) -> None:
    rows = {row["way"]: row for row in measure(tmp_path, 1, num_iterations=16)}
    write_json(ROOT / "artifacts" / "bench" / "streaming.json", rows)
    for way, row in rows.items():
        print(f"{way:<18}{row['iteration_seconds']:6.2f} s, trainer idle {row['trainer_idle_seconds']:6.2f} s")
    in_turn, ahead, streaming = (rows[way] for way in ("in turn", "max_staleness: 1", "streaming"))
    assert streaming["iteration_seconds"] < in_turn["iteration_seconds"]
    assert streaming["trainer_idle_seconds"] < ahead["trainer_idle_seconds"]
    assert streaming["engine_idle_seconds"] < in_turn["engine_idle_seconds"]
