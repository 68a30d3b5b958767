"""The watch over vLLM's process, with processes that sleep in its place."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from tasks.engines.vllm.core_process import CoreWatch

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


def test_a_core_that_says_nothing_while_it_is_waited_for_is_killed(core: BaseProcess) -> None:
    """Two seconds of silence are allowed; unasked, it may be silent for as long as it likes."""
    told = threading.Event()
    watch = CoreWatch(core, on_death=told.set, timeout_seconds=2)
    assert not told.wait(4)
    with watch.awaited():
        assert told.wait(PATIENCE)
    core.join(PATIENCE)
    assert core.exitcode == -9
