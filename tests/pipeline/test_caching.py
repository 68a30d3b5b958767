"""Caching and determinism on the test profile: what has not changed does not run; what runs again gives the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.core.files import read_jsonl
from tasks.core.records import Trajectory
from tests.pipeline.project import Project, copy_project

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Project:
    return copy_project(finished, tmp_path / "project")


def test_after_the_flow_dvc_finds_nothing_to_do(finished: Project) -> None:
    assert finished.changed() == {}
    assert "up to date" in finished.repro()


def test_a_changed_param_of_train_reruns_train_and_evaluate_alone(copy: Project) -> None:
    copy.set_params({"train.num_iterations": 2, "train.snapshot_interval": 1})
    assert set(copy.changed()) == {"train"}  # evaluate follows from its output
    output = copy.repro()
    assert [stage for stage in ("curate", "assess", "warm_start", "train", "evaluate") if f"'{stage}':" in output] == [
        "train",
        "evaluate",
    ]


def test_from_an_empty_cache_dvc_alone_gives_the_same_weights_and_results(finished: Project, copy: Project) -> None:
    for path in (copy.artifacts, copy.folder / ".dvc" / "cache", copy.folder / ".dvc" / "tmp"):
        shutil.rmtree(path)
    copy.repro()
    assert copy.snapshot_hashes() == finished.snapshot_hashes()
    assert copy.evaluation() == finished.evaluation()


def test_another_concurrency_plays_the_same_episodes(finished: Project, copy: Project) -> None:
    copy.set_params({"engine.max_concurrent_episodes": 7})
    succeeded = copy.run("tasks", "evaluate")
    assert succeeded.returncode == 0, succeeded.stderr
    name = "evaluate/trajectories/test_best.jsonl"
    pairs = zip(read_jsonl(finished.artifacts / name), read_jsonl(copy.artifacts / name), strict=True)
    for (_, one), (_, other) in pairs:
        first, second = Trajectory.from_row(one), Trajectory.from_row(other)
        assert first.token_ids == second.token_ids
        assert first.sampler_logp == pytest.approx(second.sampler_logp, abs=1e-5)
