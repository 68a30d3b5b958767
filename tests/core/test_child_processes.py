"""Child processes end whole, with their owner, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks.core.child_processes import ChildProcess, Guardian
from tests.conftest import ROOT

# A leader that starts one more process and prints both numbers.
FAMILY = "import os, subprocess, time; print(os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True); "


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


def start_family(folder: Path, then: str, **options: float) -> tuple[ChildProcess, list[int]]:
    log = folder / "log"
    child = ChildProcess([sys.executable, "-c", FAMILY + then], log=log, folder=folder / "scratch", **options)  # type: ignore[arg-type]
    assert wait_until(lambda: log.read_text().count("\n") >= 1)
    return child, [int(pid) for pid in log.read_text().splitlines()[0].split()]


@pytest.mark.slow
def test_a_child_is_stopped_with_all_it_started_and_its_folder(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    child, pids = start_family(tmp_path, "time.sleep(600)")
    assert child.is_alive() and pids[0] == child.pid
    child.stop()
    child.stop()
    assert not any(map(is_running, pids)) and not (tmp_path / "scratch").exists()
    assert child.how_it_ended() == f"was ended by signal {int(signal.SIGTERM)}"


@pytest.mark.slow
def test_what_a_child_left_running_ends_when_it_is_stopped(tmp_path: Path):
    child, (_, left) = start_family(tmp_path, "print('out of room', flush=True); raise SystemExit(3)")
    assert child.wait() == 3 and is_running(left)
    child.stop()
    assert wait_until(lambda: not is_running(left))
    assert (child.how_it_ended(), child.last_lines()) == ("ended with status 3", ["out of room"])


@pytest.mark.slow
def test_a_child_that_does_not_heed_is_killed_after_its_grace(tmp_path: Path):
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child, _ = start_family(tmp_path, deaf, grace_seconds=0.5)
    assert wait_until(lambda: child.last_lines() == ["deaf"])
    started = time.monotonic()
    child.stop()
    assert not child.is_alive() and time.monotonic() - started < 300


LARGE = """
import signal, subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); room = b'x' * 800_000_000; print('deaf', flush=True)"
print(subprocess.Popen([sys.executable, "-c", deaf + "; time.sleep(600)"]).pid, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_large_process_whose_parent_heeds_is_gone_too_when_its_group_is_stopped(tmp_path: Path):
    """As an engine of vLLM, whose memory the next one needs: it takes a moment to give it back."""
    child = ChildProcess([sys.executable, "-c", LARGE], log=tmp_path / "log", grace_seconds=0.1)
    assert wait_until(lambda: child.last_lines() == ["deaf"])
    child.stop()
    assert not is_running(int((tmp_path / "log").read_text().split()[0]))


STOPPED_AT_A_BIRTH = """
import signal, subprocess, sys, time
from tasks.core.child_processes import ChildProcess, own_guardian

def born_slowly(self, *args, _born=subprocess.Popen.__init__, **options):
    _born(self, *args, **options)
    print(self.pid, flush=True)
    time.sleep(1)  # the moment between a birth and the note of it, made long

def end(number, frame):
    raise SystemExit(128 + number)

own_guardian()
subprocess.Popen.__init__ = born_slowly
signal.signal(signal.SIGTERM, end)
ChildProcess(["sleep", "600"])
"""


@pytest.mark.slow
def test_a_child_ends_with_its_owner_that_is_stopped_in_the_moment_of_its_birth():
    with subprocess.Popen([sys.executable, "-c", STOPPED_AT_A_BIRTH], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.send_signal(signal.SIGTERM)
        assert owner.wait(timeout=60) == 128 + signal.SIGTERM
    assert wait_until(lambda: not is_running(child))


def test_the_last_lines_are_those_since_the_start_and_the_preferred_ones(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("Error of yesterday\n")
    child = ChildProcess(["printf", "one\\nError: two\\n\\nthree\\n"], log=log)
    child.wait()
    assert child.last_lines(2) == ["Error: two", "three"]
    assert child.last_lines(2, preferred="Error") == ["Error: two"]
    child.stop()


OWNER = """
import subprocess, sys, time
from pathlib import Path
from tasks.core.child_processes import ChildProcess, own_guardian
own_guardian().watch_descendants()
own_guardian().remove(Path("sockets").absolute())
library = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
inner = library.stdout.readline().strip()
child = ChildProcess(["sh", "-c", "sleep 600 & echo $!; wait"], log=Path("log"), folder=Path("scratch"))
time.sleep(2)
print(library.pid, inner, child.pid, Path("log").read_text().strip(), flush=True)
END
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["time.sleep(600)", "os = __import__('os'); os._exit(1)"])
def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path, end: str):
    """Its child, a process that a library started in no group of its own, and what both started."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "sockets").mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("END", end)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    owner.kill()
    owner.communicate()
    assert len(pids) == 4
    assert wait_until(lambda: not any(map(is_running, pids)) and [item.name for item in tmp_path.iterdir()] == ["log"])


@pytest.mark.slow
def test_a_guardian_leaves_alone_what_it_was_told_to_forget_and_what_a_library_started():
    bystander = subprocess.Popen(["sleep", "100"], start_new_session=True)
    guardian = Guardian()
    guardian.watch_descendants()
    guardian.watch(bystander.pid)
    guardian.forget(bystander.pid)
    time.sleep(1)
    guardian.close()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
