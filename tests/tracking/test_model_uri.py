"""The test trajectories of a registered version, fetched by alias or number; versions without are told in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml

from tasks.commands.policies import find_policy
from tasks.core.settings import Paths
from tasks.models.files import files_hash
from tasks.tracking import packed
from tasks.tracking.aliases import lock_registry, make_champion
from tasks.tracking.registry import Registry
from tests.measurement.synthetic import trajectory
from tests.tracking.project import SETTINGS

pytestmark = pytest.mark.slow


@pytest.fixture
def registry(project: Paths) -> Registry:
    """Version 1 carries two trajectories and is champion, version 2 is from before they were kept."""
    Path("params.yaml").write_text(yaml.safe_dump({"tracking": SETTINGS.model_dump()}), encoding="utf-8")
    registry = Registry(SETTINGS, "travel-desk-agent")
    lineage = Path("lineage")
    lineage.mkdir()
    rows = "".join(f"{json.dumps(trajectory(name).to_row())}\n" for name in ("p0", "p1"))
    (lineage / "test_trajectories.jsonl.gzip").write_bytes(gzip.compress(rows.encode()))
    tags = {"seed": "11", "snapshot": "iteration-0100", "git_commit": "abc"}
    first, second = _snapshot("first"), _snapshot("second")
    hashes = {"weights": "w1", "folder_hash": files_hash(first)}
    registry.make_model()
    version = registry.register(first, **hashes, tags=tags, run_id=None, lineage=lineage, check=lambda: None)
    with lock_registry(registry) as lock:
        make_champion(registry, lock, version, {"event": "promotion"})
    registry.register(second, weights="w2", tags={}, run_id=None, folder_hash=files_hash(second), check=lambda: None)
    return registry


def _snapshot(name: str) -> Path:
    folder = Path(name)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(name.encode())
    return folder


def test_a_version_is_a_source_by_alias_and_by_number(registry: Registry, project: Paths):
    for reference in ("models:/travel-desk-agent@champion", "models:/travel-desk-agent/1"):
        source = find_policy(reference, project)
        assert source.label == "travel-desk-agent version 1"
        assert source.seed == 11
        assert source.details == {
            "model": "travel-desk-agent",
            "version": 1,
            "snapshot": "iteration-0100",
            "weights_hash": "w1",
            "git_commit": "abc",
        }
        assert source.trajectories == project.artifacts / "fetched" / "travel-desk-agent-1.jsonl"
        assert len(source.trajectories.read_text("utf-8").splitlines()) == 2


def test_a_tag_that_is_no_seed_is_none(registry: Registry, project: Paths):
    for seed in ("--5", "²", "9" * 5000):
        registry.client.set_model_version_tag("travel-desk-agent", "1", "seed", seed)
        assert find_policy("models:/travel-desk-agent/1", project).seed is None


def test_a_version_without_trajectories_with_altered_ones_and_none_at_all_are_one_line_each(
    registry: Registry, project: Paths
):
    source = str(registry.client.get_model_version("travel-desk-agent", "1").source).removeprefix("models:/")
    stored = Path(registry.client.get_logged_model(source).artifact_location.removeprefix("file://"))
    (stored / "lineage" / "test_trajectories.jsonl.gzip").write_bytes(gzip.compress(b"{}"))
    cases = {
        "models:/travel-desk-agent/1": "test_trajectories.jsonl.gzip is gone or not the one that was registered",
        "models:/travel-desk-agent/2": "travel-desk-agent version 2 has no lineage/test_trajectories.jsonl.gzip",
        "models:/travel-desk-agent/9": "there is no such version",
        "models:/travel-desk-agent@previous": "there is no such version",
    }
    for reference, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            find_policy(reference, project)
        assert "\n" not in str(caught.value)
    assert not list((project.artifacts / "fetched").glob("*"))


def test_episodes_altered_with_the_tag_that_verifies_them_are_refused_as_fetch_does(registry: Registry, project: Paths):
    registry.client.set_model_version_tag("travel-desk-agent", "1", "lineage_files", "{}")
    with pytest.raises(ValueError, match=r"what verifies its files is not as recorded \(tag lineage_files\)"):
        find_policy("models:/travel-desk-agent/1", project)


def test_what_unpacks_to_more_than_a_hundred_times_its_size_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """3,000,000 spaces are 3 kB of gzip."""
    file, target = tmp_path / "packed", tmp_path / "rows.jsonl"
    file.write_bytes(gzip.compress(b" " * 3_000_000))
    assert packed.unpack(file, target).stat().st_size == 3_000_000  # less than is always unpacked
    monkeypatch.setattr(packed, "ALWAYS_BYTES", 1000)
    with pytest.raises(ValueError, match=r"packed: unpacks to more than .* bytes") as caught:
        packed.unpack(file, target)
    assert "\n" not in str(caught.value) and target.stat().st_size <= 100 * file.stat().st_size
    for damaged in (b"no gzip", gzip.compress(b"cut short")[:-9], gzip.compress(b"x")[:12] + b"\xff" * 20):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is no whole gzip file"):
            packed.unpack(file, target)
