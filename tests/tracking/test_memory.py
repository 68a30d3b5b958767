"""What it takes to save, merge, register and fetch a model is the memory of a shard or two, not of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.size import peaks_of, shard_sizes, write_adapter, write_base

pytestmark = pytest.mark.slow
# 190 MB in bfloat16, 8 shards, the largest the embedding with 46 MB.
SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 7, "vocab_size": 30_000}
LIBRARIES = 40e6  # what MLflow and its database take by themselves, whatever the model


def test_a_model_of_eight_shards_needs_the_memory_of_two(tmp_path: Path) -> None:
    write_base(tmp_path / "base", SHAPE, shard_bytes=20_000_000)
    write_adapter(tmp_path / "snapshot", tmp_path / "base", SHAPE)
    peaks, sizes = peaks_of(tmp_path, "save", "merge", "register", "fetch"), shard_sizes(tmp_path / "base")
    assert len(sizes) >= 8
    assert shard_sizes(tmp_path / "fetched") == sizes
    assert 2 * max(sizes) + LIBRARIES < sum(sizes)
    assert {step: peak for step, peak in peaks.items() if peak > 2 * max(sizes) + LIBRARIES} == {}
