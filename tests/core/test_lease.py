"""A process that nobody asks for any more ends, with what it started."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.conftest import ROOT

PROGRAM = """
import sys, time
from tasks.core.child_processes import ChildProcess
from tasks.core.lease import Lease
child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
lease = Lease(1.0)
for _ in range(3):
    time.sleep(0.7)
    lease.renew()
print("renewed", flush=True)
time.sleep(600)
"""


def test_a_process_outlives_its_lease_only_while_it_is_renewed() -> None:
    """Renewed for 2.1 s with a lease of 1 s, then no more."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    child, renewed = done.stdout.split()
    assert (done.returncode, renewed) == (70, "renewed")
    left = [process for process in psutil.process_iter() if process.pid == int(child)]
    assert not psutil.wait_procs(left, timeout=60)[1]
