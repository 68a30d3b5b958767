"""A process that nobody asks for any more ends, with what it started."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys, time
from tasks.core.child_processes import ChildProcess
from tasks.core.lease import LOOK_SECONDS, Lease
child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
lease = Lease(600.0)
lease.renewed -= 400
lease.renew()
lease.renewed -= 400
time.sleep(2 * LOOK_SECONDS)
print("renewed", flush=True)
lease.renewed -= 400
time.sleep(600)
"""


@pytest.mark.slow
def test_a_process_outlives_its_lease_only_while_it_is_renewed() -> None:
    """A lease of 600 s, 400 s old when it is renewed, 400 s old when it still lives, then 800 s."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    child, renewed = done.stdout.split()
    assert (done.returncode, renewed) == (70, "renewed")
    left = [process for process in psutil.process_iter() if process.pid == int(child)]
    assert not psutil.wait_procs(left, timeout=60)[1]
