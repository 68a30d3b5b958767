"""DVC's own commands for experiments, on the toy project: in place, in a temporary copy and from the queue; and what
they compare.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import Any

import pytest

from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project

pytestmark = pytest.mark.flow
PATIENCE_SECONDS = 300


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Its stages have run with the test profile, and git knows it."""
    project = make_toy_project(tmp_path_factory.mktemp("experiments") / "project")
    project.repro()
    for command in (
        ["config", "user.name", "test"], ["config", "user.email", "test@example.org"], ["add", "--all"],
        ["commit", "-qm", "toy"],
    ):  # fmt: skip
        subprocess.run(["git", *command], cwd=project.folder, check=True)
    return project


def dvc(project: Project, *arguments: str) -> str:
    done = project.run("dvc", *arguments, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def experiments(project: Project) -> dict[float, dict[str, Any]]:
    """The metrics of every finished experiment, by the learning rate it ran with."""
    found = {}
    for baseline in json.loads(dvc(project, "exp", "show", "--json")):
        for experiment in baseline.get("experiments") or []:
            data = experiment["revs"][0]["data"]
            if data and data.get("metrics"):
                rate = data["params"]["params.yaml"]["data"]["train"]["learning_rate"]
                found[rate] = data["metrics"]["artifacts/evaluate/metrics.json"]["data"]
    return found


def num_finished(project: Project) -> int:
    """By git's names of them: `dvc queue status` costs 2 s of the processor that the queue needs."""
    command = ["git", "for-each-ref", "--format=%(refname)", "refs/exps"]
    names = subprocess.run(command, cwd=project.folder, check=True, capture_output=True, text=True).stdout
    return len(re.findall(r"^refs/exps/\w\w/", names, re.MULTILINE))


def wait_until_queue_is_done(project: Project, before: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while num_finished(project) == before and time.monotonic() < deadline:
        time.sleep(0.2)
    while "Success" not in (status := dvc(project, "queue", "status")):
        assert "Failed" not in status and time.monotonic() < deadline, status
        time.sleep(1)


def test_an_experiment_runs_in_place_in_a_copy_and_from_the_queue_and_is_compared(project: Project):
    dvc(project, "exp", "run", "--temp", "-S", "train.learning_rate=0.25")
    dvc(project, "exp", "run", "--queue", "-S", "train.learning_rate=0.5")
    before = num_finished(project)
    dvc(project, "queue", "start")
    wait_until_queue_is_done(project, before)
    assert dvc(project, "metrics", "diff", "--json").strip() == "{}"  # the folder itself is as it was
    dvc(project, "exp", "run", "-S", "train.learning_rate=0.125")
    difference = json.loads(dvc(project, "metrics", "diff", "--json"))
    assert difference["artifacts/evaluate/metrics.json"]["learning_rate"]["new"] == 0.125
    assert {rate: numbers["learning_rate"] for rate, numbers in experiments(project).items()} == {
        rate: rate for rate in (0.125, 0.25, 0.5)
    }
    curve = json.loads(dvc(project, "plots", "diff", "--json", "--targets", "artifacts/train/curve.csv"))
    assert "artifacts/train/curve.csv" in curve["data"]
