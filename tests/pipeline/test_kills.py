"""kill -9 of a stage in the middle, each stage once: the last flow ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.pipeline.project import Project, copy_project

pytestmark = pytest.mark.slow
STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote")


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


def forget_everything(project: Project) -> None:
    """Undo every stage, DVC's cache included, so that the next flow has to run them."""
    shutil.rmtree(project.folder / ".dvc" / "cache")
    for name in STAGES:
        shutil.rmtree(project.artifacts / name, ignore_errors=True)


def test_killed_once_in_each_stage_the_flow_ends_with_the_same_result(finished: Project, tmp_path: Path) -> None:
    """Each start gets one stage further. Every other kill takes the whole flow, the rest the stage's process alone."""
    project = copy_project(finished, tmp_path / "project")
    forget_everything(project)
    for number, stage in enumerate(STAGES):
        kill_in_the_middle(project, stage, whole_flow=number % 2 == 0)
    project.flow()
    assert project.evaluation() == finished.evaluation()
    assert project.snapshot_hashes() == finished.snapshot_hashes()
    assert project.decision()["verdict"] == finished.decision()["verdict"]
    assert project.versions() == finished.versions()
    assert project.leftovers() == []
