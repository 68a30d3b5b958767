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

pytestmark = pytest.mark.flow
STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote")


def stage_process(project: Project, stage: str) -> psutil.Process | None:
    for process in project.processes():
        try:
            if process.cmdline()[-3:] == ["-m", "tasks", stage]:
                return process
        except psutil.Error:
            continue
    return None


def kill_in_the_middle(project: Project, stage: str, *command: str, is_whole: bool) -> None:
    """Start a command that comes to the stage, wait for its process, give it a moment to be at work, and kill without a
    warning: the stage's process alone, or the whole of the flow.
    """
    run = project.start(*command)
    deadline = time.monotonic() + 600
    while (process := stage_process(project, stage)) is None:
        assert time.monotonic() < deadline, f"{stage} never started"
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    time.sleep(0.8)
    if is_whole:
        os.kill(run.pid, signal.SIGKILL)
    else:
        process.kill()
    run.communicate(timeout=600)
    assert run.returncode != 0
    while project.processes():
        assert time.monotonic() < deadline, "something outlived the flow"
        time.sleep(0.1)


def forget_everything(project: Project) -> None:
    """Undo every stage, DVC's cache included, so that the next flow has to run them."""
    shutil.rmtree(project.folder / ".dvc" / "cache")
    for name in STAGES:
        shutil.rmtree(project.artifacts / name, ignore_errors=True)


def test_killed_once_in_each_stage_the_flow_ends_with_the_same_result(
    finished: Project, databases: Path, prefect: dict[str, str], tmp_path: Path
) -> None:
    """Each start gets one stage further. One kill takes the whole flow, one the stage's process alone under a flow, and
    four the stage's process under DVC without a flow, which starts sooner.
    """
    project = copy_project(finished, tmp_path / "project").lay(databases)
    project.server = prefect
    forget_everything(project)
    flow, dvc = ("flows", "run"), ("dvc", "repro")
    kill_in_the_middle(project, "curate", *dvc, "curate", is_whole=False)
    kill_in_the_middle(project, "assess", *dvc, "assess", is_whole=False)
    kill_in_the_middle(project, "warm_start", *dvc, "warm_start", is_whole=False)
    kill_in_the_middle(project, "train", *flow, is_whole=True)
    kill_in_the_middle(project, "evaluate", *dvc, "evaluate", is_whole=False)
    kill_in_the_middle(project, "promote", *flow, is_whole=False)
    project.flow()
    assert project.evaluation() == finished.evaluation()
    assert project.snapshot_hashes() == finished.snapshot_hashes()
    assert project.decision()["decision"] == finished.decision()["decision"]
    assert project.versions() == finished.versions()
    assert project.leftovers() == []
