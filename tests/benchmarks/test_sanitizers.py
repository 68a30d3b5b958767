"""The C code under ASan and UBSan: a read of freed memory changes no number, so no other test sees it.

The quick tests of the three libraries, and an engine that is dropped amid steps, in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.models.native.compiled import find_compilers
from tests.benchmarks.sanitized import FOLDER
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
FILES = (
    "tests/engines/transformers/test_step_in_c.py",
    "tests/models/test_fused_forward.py",
    "tests/models/test_tree_attention.py",
)
AMID_STEPS = "test_an_engine_that_is_dropped_or_closed_amid_steps_lets_them_end_first"


def sanitizers() -> str:
    """The compiler's own two libraries, for LD_PRELOAD."""
    found = [
        subprocess.run([find_compilers()[0], f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(str(Path(name).resolve()) for name in found)


def run_sanitized(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ, FOLDER: str(folder), "LD_PRELOAD": sanitizers(), "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "tests.benchmarks.sanitized", "-n0", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_quick_tests_of_the_c_code_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    done = run_sanitized(tmp_path, "-m", "not slow", *FILES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_an_engine_dropped_amid_steps_frees_nothing_that_its_threads_read(tmp_path: Path) -> None:
    done = run_sanitized(tmp_path, "-m", "slow", FILES[0], "-k", AMID_STEPS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "1 passed" in done.stdout
