"""A process that leaves quickly has done all that Python does at an exit, and ends with the same status."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys
from tasks.core.quick_exit import prepare_quick_exit, quick_exit
prepare_quick_exit()
import atexit, threading, time

class Heavy:
    def __del__(self): print("taken apart")

heavy = Heavy()
heavy.itself = heavy
def work():
    time.sleep(0.3)
    print("joined")
with quick_exit():
    atexit.register(lambda: print("called"))
    threading.Thread(target=work).start()
    sys.stdout.write("unflushed ")
    {end}
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("{end}", end)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("raise SystemExit(130)", 130)]
)
def test_threads_are_joined_callbacks_run_and_output_is_there(end: str, status: int):
    done = run(end)
    assert done.stdout == "unflushed joined\ncalled\n"
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.slow
def test_an_error_or_a_message_ends_it_in_pythons_way():
    done = run("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "taken apart" in done.stdout
    done = run("sys.exit('a message')")
    assert (done.returncode, done.stderr) == (1, "a message\n")


@pytest.mark.slow
def test_output_that_nobody_takes_is_the_status_that_python_has_for_it():
    program = PROGRAM.replace("{end}", "pass")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (120, "")
