"""Memory of what a model of 1.5 billion parameters is carried through. Writes artifacts/bench/size.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import write_json
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.size import SHAPE_1_5B, peaks_of, shard_sizes, write_adapter, write_base
from tests.conftest import ROOT

pytestmark = pytest.mark.bench


def test_a_model_of_1_5_billion_parameters_needs_the_memory_of_two_of_its_shards(tmp_path: Path) -> None:
    write_base(tmp_path / "base", SHAPE_1_5B, shard_bytes=500_000_000)
    write_adapter(tmp_path / "snapshot", tmp_path / "base", SHAPE_1_5B)
    peaks = {**peaks_of(tmp_path, "merge", "register", "fetch"), **peaks_of(tmp_path, "save")}
    base, saved = shard_sizes(tmp_path / "base"), shard_sizes(tmp_path / "saved")
    report = {"machine": cpu_model(), "shards": base, "saved_shards": saved, "peak_above_before": peaks}
    print(report)
    write_json(ROOT / "artifacts" / "bench" / "size.json", report)
    assert peaks.pop("save") <= 2 * max(saved)
    assert {step: peak for step, peak in peaks.items() if peak > 2 * max(base)} == {}
