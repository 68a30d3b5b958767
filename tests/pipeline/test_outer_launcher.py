"""The launcher that TURNWISE_LAUNCH names: how its end is told, and how it is stopped. Stand-ins are of bash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.core.passing_faults import PassingFault
from tasks.pipeline.outer_launcher import LAUNCH, launch_command, run_launched
from tests.conftest import ROOT
from tests.pipeline.test_launch import launch


def test_a_launcher_that_cannot_be_read_or_started_is_refused_with_the_variables_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{LAUNCH} is 'srun --x=\"a'.*No closing quotation.*Correct it"):
        launch_command("train", launch(), [], {LAUNCH: 'srun --x="a'})
    (tmp_path / "srun").touch(mode=0o644)
    for program, found in ((tmp_path / "srun", "Permission denied"), (tmp_path / "none", "No such file")):
        with pytest.raises(ValueError, match=rf"{LAUNCH} begins with {program}, which \S+ cannot start \({found}"):
            run_launched([str(program)])


@pytest.mark.parametrize(
    ("ends", "how"), [("exit 137", "ended with status 137"), ("kill -9 $$", "was ended by signal 9")]
)
def test_a_launcher_whose_rank_was_killed_is_a_fault_that_may_pass(ends: str, how: str) -> None:
    """srun's status is then 128 and the signal, which is above the 75 of the ranks that lost it."""
    with pytest.raises(PassingFault, match=rf"bash, the launcher of {LAUNCH}, {how}.*last checkpoint"):
        run_launched(["bash", "-c", ends])


def test_a_mistake_of_launched_ranks_is_this_process_status() -> None:
    with pytest.raises(SystemExit) as ended:
        run_launched(["bash", "-c", "exit 3"])
    assert ended.value.code == 3


LAUNCHING = """
import sys
from tasks.pipeline.cli_errors import one_line_errors
from tasks.pipeline.outer_launcher import run_launched
with one_line_errors(debug=False):
    run_launched(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_launcher_may_end_its_ranks_where_this_process_is_stopped(tmp_path: Path) -> None:
    """As srun does, which must cancel those of other machines."""
    srun = "trap 'sleep 0.3; echo cancelled > ended; exit 143' TERM; touch started; while :; do sleep 0.05; done"
    run = subprocess.Popen(
        [sys.executable, "-c", LAUNCHING, "bash", "-c", srun], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    while not (tmp_path / "started").exists():
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=120) == 143
    assert (tmp_path / "ended").read_text(encoding="utf-8") == "cancelled\n"
