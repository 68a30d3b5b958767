"""One run at a time in a folder: the lock goes with its owner, and a flow shares it with its own stages alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.pipeline.run_lock import FLOW_PID_VARIABLE, only_run
from tests.conftest import ROOT

HOLD = "import sys, time, pathlib; from tasks.pipeline.run_lock import only_run\n"
HOLD += "with only_run(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


@pytest.fixture
def other_run(tmp_path: Path):
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path, other_run: subprocess.Popen[str]):
    with pytest.raises(ValueError, match=rf"another run \(process {other_run.pid}\)"), only_run(tmp_path):
        pass


def test_the_lock_of_a_killed_run_is_free_at_once(tmp_path: Path, other_run: subprocess.Popen[str]):
    other_run.kill()
    other_run.wait()
    with only_run(tmp_path):
        assert (tmp_path / ".flow.lock").read_text() == str(os.getpid())


def test_a_stage_works_under_the_lock_of_the_flow_that_started_it(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FLOW_PID_VARIABLE, str(other_run.pid))
    with only_run(tmp_path):
        assert (tmp_path / ".flow.lock").read_text() == str(other_run.pid)


def test_a_variable_left_over_from_another_flow_opens_nothing(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FLOW_PID_VARIABLE, str(os.getpid()))
    with pytest.raises(ValueError, match="another run"), only_run(tmp_path):
        pass


def test_two_folders_do_not_know_each_other(tmp_path: Path, other_run: subprocess.Popen[str]):
    with only_run(tmp_path / "elsewhere"):
        pass
