"""kill -9 of a stage in the middle, each stage once: the next flow ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline.project import Project, copy_project, make_project

pytestmark = pytest.mark.slow
# What makes a stage run again in a copy of a finished project: one setting that its results do not depend on.
HARMLESS: dict[str, dict[str, Any]] = {
    "curate": {"curate.max_level": 1, "curate.num_generated": 1501},
    "assess": {"assess.confidence": 0.94},
    "warm_start": {"warm_start.max_grad_norm": 1.5},
    "train": {"train.max_grad_norm": 1.5},
    "evaluate": {"evaluate.confidence": 0.94},
    "promote": {},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("kills") / "project")
    project.flow()
    return project


def stage_process(project: Project, stage: str) -> psutil.Process | None:
    for process in project.processes():
        try:
            if process.cmdline()[-3:] == ["-m", "tasks", stage]:
                return process
        except psutil.Error:
            continue
    return None


def kill_in_the_middle(project: Project, stage: str, *, whole_flow: bool) -> None:
    """Start the flow, wait for the stage's process, give it a moment to be at work, and kill without a warning."""
    flow = project.start("flows", "run")
    deadline = time.monotonic() + 300
    while (process := stage_process(project, stage)) is None:
        assert time.monotonic() < deadline, f"{stage} never started"
        assert flow.poll() is None, flow.communicate()
        time.sleep(0.02)
    time.sleep(0.8)
    if whole_flow:
        os.kill(flow.pid, signal.SIGKILL)
    else:
        process.kill()
    flow.communicate(timeout=120)
    assert flow.returncode != 0
    while project.processes():
        assert time.monotonic() < deadline, "something outlived the flow"
        time.sleep(0.1)


@pytest.mark.parametrize("number", range(6), ids=list(HARMLESS))
def test_a_killed_stage_starts_over_and_the_result_is_the_same(finished: Project, tmp_path: Path, number: int) -> None:
    """Every other kill takes the whole flow with it, the rest only the stage's own process."""
    stage = list(HARMLESS)[number]
    undisturbed = copy_project(finished, tmp_path / "undisturbed")
    undisturbed.set_params(HARMLESS[stage])
    killed = copy_project(finished, tmp_path / "killed")
    killed.set_params(HARMLESS[stage])
    kill_in_the_middle(killed, stage, whole_flow=number % 2 == 0)
    killed.flow()
    undisturbed.flow()
    assert killed.evaluation() == undisturbed.evaluation()
    assert killed.snapshot_hashes() == undisturbed.snapshot_hashes()
    assert killed.versions() == undisturbed.versions()
    assert killed.decision()["verdict"] in ("promote", "hold")
    assert killed.leftovers() == []
