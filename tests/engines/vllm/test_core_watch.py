"""The watch over vLLM's process, with processes that sleep in its place."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from tasks.engines.vllm.core_watch import CoreWatch, Guard

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
    watch = CoreWatch(core, Guard(), on_death=told.set, timeout_seconds=600)
    with watch.awaited():
        core.kill()
        assert told.wait(PATIENCE)
    watch.dismiss()


def test_a_core_that_says_nothing_while_it_is_waited_for_is_killed(core: BaseProcess) -> None:
    """Two seconds of silence are allowed; unasked, it may be silent for as long as it likes."""
    told = threading.Event()
    watch = CoreWatch(core, Guard(), on_death=told.set, timeout_seconds=2)
    assert not told.wait(4)
    with watch.awaited():
        assert told.wait(PATIENCE)
    core.join(PATIENCE)
    assert core.exitcode == -9
    watch.dismiss()


def test_nothing_outlives_a_process_that_was_killed_while_its_core_was_starting() -> None:
    """The core and what that has started, the one with another name; a stranger lives on."""
    script = (
        "import os, subprocess, time\n"
        "from tasks.engines.vllm.core_watch import Guard\n"
        "stranger = subprocess.Popen(['sleep', '600'])\n"
        "guard = Guard()\n"
        "guarded = {**os.environ, **guard.variables}\n"
        "core = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; wait'], env=guarded, stdout=subprocess.PIPE)\n"
        "print(guard.folder, stranger.pid, core.pid, core.stdout.readline().decode(), flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder, *numbers = owner.stdout.readline().split()
    stranger, *guarded = map(psutil.Process, map(int, numbers))
    assert Path(folder).is_dir()
    owner.kill()
    deadline = time.monotonic() + PATIENCE
    while (any(map(_is_alive, guarded)) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert [_is_alive(process) for process in (stranger, *guarded)] == [True, False, False]
    stranger.kill()
    owner.communicate()


def test_a_guard_that_is_dismissed_kills_nothing() -> None:
    guard = Guard()
    with subprocess.Popen(["sleep", "600"], env=guard.variables) as core:
        guard.dismiss()
        guard.dismiss()
        assert guard.shell.returncode == 0 and core.poll() is None
        assert not guard.folder.exists()
        core.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
