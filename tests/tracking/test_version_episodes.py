"""The test trajectories of a registered version, fetched by alias or number; versions without are told in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tasks.settings import Paths
from tasks.sources import find_policy
from tasks.tracking.registry import Registry
from tasks.tracking.version_episodes import STORED
from tests.measurement.synthetic import trajectory
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow


@pytest.fixture
def registry(project: Paths) -> Registry:
    """Version 1 carries two trajectories and is champion, version 2 is from before they were kept."""
    registry = Registry(SETTINGS, "travel-desk-agent")
    rows = [trajectory(name).to_row() for name in ("p0", "p1")]
    first = _snapshot(Path("first"), gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    tags = {"seed": "11", "snapshot": "step-0100", "git_commit": "abc"}
    registry.register(first, weights="w1", tags=tags, run_id=None)
    registry.client.set_registered_model_alias("travel-desk-agent", "champion", "1")
    registry.register(_snapshot(Path("second"), None), weights="w2", tags={}, run_id=None)
    registry.register(_snapshot(Path("third"), b"not gzip"), weights="w3", tags={}, run_id=None)
    altered = {"lineage_files": json.dumps({"test_trajectories.jsonl.gz": "0" * 64})}
    registry.register(_snapshot(Path("fourth"), gzip.compress(b"{}")), weights="w4", tags=altered, run_id=None)
    return registry


def _snapshot(folder: Path, packed: bytes | None) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    if packed is not None:
        (folder / STORED).parent.mkdir()
        (folder / STORED).write_bytes(packed)
    return folder


def test_a_version_is_a_source_by_alias_and_by_number(registry: Registry, project: Paths):
    for reference in ("models:/travel-desk-agent@champion", "models:/travel-desk-agent/1"):
        source = find_policy(reference, project, SETTINGS)
        assert source.label == "travel-desk-agent version 1"
        assert source.seed == 11
        assert source.details == {
            "model": "travel-desk-agent",
            "version": 1,
            "snapshot": "step-0100",
            "weights_hash": "w1",
            "git_commit": "abc",
        }
        assert source.trajectories == project.artifacts / "fetched" / "travel-desk-agent-1.jsonl"
        assert len(source.trajectories.read_text("utf-8").splitlines()) == 2


def test_a_version_without_with_damaged_or_with_altered_trajectories_and_none_at_all_are_one_line_each(
    registry: Registry, project: Paths
):
    cases = {
        "models:/travel-desk-agent/2": "travel-desk-agent version 2 carries no lineage/test_trajectories.jsonl.gz",
        "models:/travel-desk-agent/3": "version 3: its lineage/test_trajectories.jsonl.gz is damaged",
        "models:/travel-desk-agent/4": "is not the one that was registered",
        "models:/travel-desk-agent/9": "the registry has no such version",
        "models:/travel-desk-agent@previous": "the registry has no such version",
    }
    for reference, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            find_policy(reference, project, SETTINGS)
        assert "\n" not in str(caught.value)
    assert not list((project.artifacts / "fetched").glob("*"))
