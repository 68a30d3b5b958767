"""A version made again from its lineage: by the commands as printed, in a clean clone, and by `lineage --verify`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.models.folders import weights_hash
from tests.pipeline.project import FLOW_SECONDS, Project

pytestmark = pytest.mark.bench
MODEL = "models:/travel-desk-agent/1"


@pytest.fixture(scope="module")
def promoted(finished: Project) -> Project:
    """The finished project with a version, whatever its policy said."""
    if not finished.versions():
        forced = finished.run("tasks", "promote", "--force", "--reason", "for the test")
        assert forced.returncode == 0, forced.stderr
    return finished


@pytest.fixture(scope="module")
def row(promoted: Project) -> dict[str, Any]:
    told = promoted.run("tasks", "lineage", MODEL, "--json")
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout))


def test_the_commands_as_printed_make_the_same_weights_in_a_clean_clone(promoted: Project, row: dict[str, Any]) -> None:
    assert row["missing"] == [] and row["code"]["git_dirty"] == "false"
    commands = ["set -e", *row["reproduce"]["commands"], "pwd", "git status --porcelain"]
    done = subprocess.run(
        ["bash", "-c", "\n".join(commands)], cwd=promoted.folder, env=promoted.environment(), capture_output=True,
        text=True, timeout=FLOW_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    clone = promoted.folder.parent / "travel-desk-agent-1"
    assert str(clone) in done.stdout
    assert weights_hash(clone / "artifacts" / "train" / "snapshots" / row["snapshot"]) == row["weights"]
    assert done.stdout.splitlines()[-1] == " M dvc.lock"


def test_verify_makes_it_again_compares_and_goes_on_where_it_was(promoted: Project, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    made = promoted.run("tasks", "lineage", MODEL, "--verify", str(folder))
    assert made.returncode == 0, made.stdout + made.stderr
    assert "everything is the same" in made.stdout and "differs" not in made.stdout
    record = folder / "artifacts" / "provenance" / "train.json"
    again = promoted.run("tasks", "lineage", MODEL, "--verify", str(folder))
    assert again.returncode == 0, again.stderr
    assert "Running stage" not in again.stdout  # DVC had all of it
    assert json.loads(record.read_text(encoding="utf-8"))["git_dirty"] == "false"
    # Another result under DVC's own hand: the version's snapshot is no longer what the rebuild holds.
    params = (folder / "params.yaml").read_text(encoding="utf-8")
    (folder / "params.yaml").write_text(params.replace("seed: 7", "seed: 8", 1), encoding="utf-8")
    other = promoted.run("tasks", "lineage", MODEL, "--verify", str(folder))
    assert other.returncode == 1
    assert "parts differ" in other.stdout
