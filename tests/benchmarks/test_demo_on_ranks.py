"""The demo at full size with two trainers, from curate to promote: the same success as with one (README, seed 11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import make_project

pytestmark = pytest.mark.bench
ONE_RANK = (0.917, 0.981)  # of test; the interval of 95% in the README


@pytest.mark.timeout(5400)
def test_the_demo_on_two_ranks_ends_at_the_success_of_one_and_is_promoted(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", profile=None)
    project.set_params({"launch.launcher": "torchrun", "launch.num_trainers": 2, "compute.num_threads": 1})
    done = project.run("flows", "run", timeout=5000)
    assert done.returncode == 0, done.stderr
    for stage in ("warm_start", "train"):
        record = read_json(project.artifacts / "provenance" / f"{stage}.json")
        assert (record["launcher"], record["num_trainers"]) == ("torchrun", 2)
    summary = read_json(project.artifacts / "summary.json")
    test = summary["test"]
    print(f"{test['success_rate']:.1%} of test ({test['ci_low']:.1%} to {test['ci_high']:.1%})", summary["seconds"])
    assert ONE_RANK[0] <= test["success_rate"] <= 1
    assert test["ci_low"] <= ONE_RANK[1] and test["ci_high"] >= ONE_RANK[0]
    assert summary["champion"]["promoted"]
