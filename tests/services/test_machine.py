"""The machine itself fails: its disk is full when a checkpoint is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import ROOT
from tests.pipeline.kill_points import result_hash, whole_run

pytestmark = [pytest.mark.slow, pytest.mark.outage]

# In a mount namespace of its own, which ends with it: nothing of the machine's is touched.
FULL_DISK = """
set -eu
mount -t tmpfs -o size=$SIZE tmpfs "$PLACE/resume"
"$PYTHON" -m tests.pipeline.training_worker "$START" "$PLACE" && exit 9
mount -o remount,size=1g "$PLACE/resume"
rm -rf "$PLACE/output"
"$PYTHON" -m tests.pipeline.training_worker "$START" "$PLACE"
cp -r "$PLACE/resume" "$PLACE/kept"
"""


def test_a_disk_full_at_a_checkpoint_ends_training_in_one_line_and_with_space_it_ends_bitwise_the_same(
    tmp_path: Path,
) -> None:
    start = tiny.model_folder(tmp_path / "start")
    whole = whole_run(start, tmp_path / "whole")
    size = sum(file.stat().st_size for file in (whole.place / "resume").rglob("*") if file.is_file())
    place = tmp_path / "full"
    (place / "resume").mkdir(parents=True)
    given = {"SIZE": str(size), "PLACE": str(place), "START": str(start), "PYTHON": sys.executable}
    environment = {**os.environ, **given, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", FULL_DISK]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    last = [line for line in run.stderr.splitlines() if line.startswith("ValueError: ")][-1]
    assert "could not be written" in last and "run the same command again" in last
    (place / "resume").rmdir()
    (place / "kept").rename(place / "resume")
    assert result_hash(place) == whole.hash
