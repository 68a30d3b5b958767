"""Caching and determinism on the test profile: what has not changed does not run; what runs again gives the same.

That a changed param runs its own stages again is in test_flow.py; that all of them, run again, give the same weights
is in test_kills.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import read_jsonl
from tasks.core.records import Trajectory
from tests.pipeline.project import Project, copy_project

pytestmark = pytest.mark.flow


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Project:
    return copy_project(finished, tmp_path / "project")


def test_after_the_flow_dvc_finds_nothing_to_do(finished: Project) -> None:
    assert finished.changed() == {}
    assert "up to date" in finished.repro()


def test_another_concurrency_plays_the_same_episodes(finished: Project, copy: Project) -> None:
    copy.set_params({"engine.max_concurrent_episodes": 7})
    succeeded = copy.run("tasks", "evaluate")
    assert succeeded.returncode == 0, succeeded.stderr
    name = "evaluate/trajectories/test_best.jsonl"
    pairs = zip(read_jsonl(finished.artifacts / name), read_jsonl(copy.artifacts / name), strict=True)
    for (_, one), (_, other) in pairs:
        first, second = Trajectory.from_row(one), Trajectory.from_row(other)
        assert first.sequences[0].token_ids == second.sequences[0].token_ids
        assert first.sequences[0].sampler_logp == pytest.approx(second.sequences[0].sampler_logp, abs=1e-5)
