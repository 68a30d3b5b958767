"""Does `plan` say what a warm start takes? Two layers of Qwen2.5-0.5B's shape, with random weights; up to 8 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.benchmarks.at_size import Variant, in_a_process
from tests.benchmarks.warm_start import planned
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
WITHIN = 0.15


def test_a_warm_start_takes_the_memory_that_plan_said(tmp_path: Path) -> None:
    variant = Variant("Qwen2.5-0.5B", "float32", has_lora=True, layers=2)
    in_a_process("build", tmp_path, variant)
    command = [sys.executable, "-m", "tests.benchmarks.warm_start", str(tmp_path), json.dumps(asdict(variant))]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    peaks, told = json.loads(done.stdout.splitlines()[-1]), planned(variant)
    print(f"\n{max(peaks.values()) / 1e9:.2f} GB of {told / 1e9:.2f} GB")
    assert abs(max(peaks.values()) / told - 1) <= WITHIN
