"""A second machine: champion, results and cache reach it by git, `dvc pull`, MLflow and S3 alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks.core.files import content_hash
from tasks.models.folders import weights_hash
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project
from tests.services.fixtures import Services
from tests.services.installation import Installation

pytestmark = [pytest.mark.flow, pytest.mark.services]
NAME = "second-machine"
AUTHOR = ["-c", "user.name=test", "-c", "user.email=test@example.org"]


def clone(project: Project, folder: Path) -> Project:
    """What a person does before and after the way to another machine; its home folder is empty."""
    subprocess.run(["git", "add", "--all"], cwd=project.folder, check=True)
    subprocess.run(["git", *AUTHOR, "commit", "-q", "-m", "a run"], cwd=project.folder, check=True)
    subprocess.run(["git", "clone", "-q", project.folder, folder], check=True)
    (folder / "knobs").mkdir()
    other = Project(folder)
    other.server = project.server
    assert not other.home.exists() and not other.artifacts.exists()
    other._succeed("dvc", "pull")
    return other


@pytest.mark.usefixtures("scheduled_meanwhile")
def test_a_clone_has_nothing_to_do_after_a_pull_and_trains_on_against_the_same_champion(
    services: Services, tmp_path: Path
) -> None:
    first = make_toy_project(tmp_path / "first")
    installation = Installation(first, services, NAME)
    first.server |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # for DVC by hand; our commands exempt it
    first.flow()
    first._succeed("dvc", "remote", "add", "-d", "store", f"s3://{services.store.bucket}/{NAME}-dvc")
    first._succeed("dvc", "push")
    assert installation.versions() == [1]

    second = clone(first, tmp_path / "second")
    for stage in ("curate", "train", "evaluate"):
        assert content_hash(second.artifacts / stage) == content_hash(first.artifacts / stage)
    assert "nothing changed" in second.flow().lower()
    assert installation.versions() == [1]
    second._succeed("tasks", "fetch", f"models:/{NAME}@champion", "champion")
    assert weights_hash(second.folder / "champion") == first.decision()["challenger"]["weights"]

    second.set_params({"seed": 99})
    second.flow()
    assert second.decision()["champion_before"]["version"] == 1
    assert installation.champion().version == "1"
