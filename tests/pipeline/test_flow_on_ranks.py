"""The whole flow with two trainers: what follows training sees no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.rank_drill


def test_a_flow_on_two_ranks_ends_as_one_on_one_rank_does(
    finished: Project, databases: Path, prefect: dict[str, str], tmp_path: Path
) -> None:
    """The same problems are drawn and played; from the second update on the last digits differ, and so may tokens. Each
    result is in the other's interval of 95%.
    """
    project = make_project(tmp_path / "project").lay(databases)
    project.server = prefect
    project.set_params({"launch.launcher": "torchrun", "launch.num_trainers": 2})
    project.flow()
    record = read_json(project.artifacts / "provenance" / "train.json")
    assert (record["launcher"], record["num_trainers"]) == ("torchrun", 2)
    one, two = (place.evaluation()["test"]["best"] for place in (finished, project))
    assert one["ci_low"] <= two["success_rate"] <= one["ci_high"]
    assert two["ci_low"] <= one["success_rate"] <= two["ci_high"]
    assert project.decision()["decision"] == finished.decision()["decision"]
    assert len(project.versions()) == len(finished.versions())
    assert [*project.snapshot_hashes()] == [*finished.snapshot_hashes()]
    print(f"one rank {one['success_rate']:.3f} [{one['ci_low']:.3f}, {one['ci_high']:.3f}], ", end="")
    print(f"two {two['success_rate']:.3f} [{two['ci_low']:.3f}, {two['ci_high']:.3f}]", project.decision()["decision"])
