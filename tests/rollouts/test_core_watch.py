"""The watch over vLLM's process, with processes that sleep in its place."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil
import pytest

from tasks.rollouts.core_watch import CoreWatch

pytestmark = pytest.mark.slow
PATIENCE = 120  # seconds, on a busy machine


@pytest.fixture
def core() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


def test_who_waits_is_told_of_a_death(core: BaseProcess) -> None:
    told = threading.Event()
    watch = CoreWatch(core, on_death=told.set, timeout_seconds=600)
    with watch.awaited():
        core.kill()
        assert told.wait(PATIENCE)
    watch.dismiss()


def test_a_core_that_says_nothing_while_it_is_waited_for_is_killed(core: BaseProcess) -> None:
    """Two seconds of silence are allowed; unasked, it may be silent for as long as it likes."""
    told = threading.Event()
    watch = CoreWatch(core, on_death=told.set, timeout_seconds=2)
    assert not told.wait(4)
    with watch.awaited():
        assert told.wait(PATIENCE)
    core.join(PATIENCE)
    assert core.exitcode == -9
    watch.dismiss()


def test_a_core_does_not_outlive_a_process_that_was_killed() -> None:
    script = (
        "import subprocess, time\n"
        "from tasks.rollouts.core_watch import start_guard\n"
        "core = subprocess.Popen(['sleep', '600'])\n"
        "start_guard(core.pid)\n"
        "print(core.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    core = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    deadline = time.monotonic() + PATIENCE
    while _is_alive(core) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(core)
    owner.communicate()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
