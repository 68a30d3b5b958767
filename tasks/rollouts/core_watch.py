"""Watching the process vLLM computes in: whoever waits for it is told of its death, and it never outlives this process.

vLLM 0.32 leaves a caller waiting for ever when its engine core is killed (its monitor closes the connection and wakes
nobody), and a core whose parent is killed goes on living, with all its memory. Both were measured.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Lock, Thread

TICK_SECONDS = 1.0


class CoreWatch:
    """A thread beside `core`: calls `on_death` once it has ended, and kills it after `timeout_seconds` of silence while
    it is waited for. Silence is counted in ticks of this process, so that one which was stopped itself blames nobody.
    """

    def __init__(self, core: BaseProcess, *, on_death: Callable[[], None], timeout_seconds: float):
        assert core.pid is not None
        self.core, self.on_death, self.timeout_seconds = core, on_death, timeout_seconds
        self.is_awaited, self.silent_seconds = False, 0.0
        self.guard, self.dismissal = start_guard(core.pid), Lock()
        Thread(target=self._watch, daemon=True, name="vllm-core-watch").start()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, the core is expected to say something."""
        self.silent_seconds, self.is_awaited = 0.0, True
        try:
            yield
        finally:
            self.is_awaited = False

    def dismiss(self) -> None:
        """The core was ended on purpose; any thread may say so, and more than once."""
        with self.dismissal:
            if self.guard.poll() is None:
                self.guard.communicate(b"\n")

    def _watch(self) -> None:
        while not wait([self.core.sentinel], timeout=TICK_SECONDS):
            self.silent_seconds += TICK_SECONDS
            if self.is_awaited and self.silent_seconds > self.timeout_seconds:
                self.core.kill()
        self.on_death()


def start_guard(process: int) -> subprocess.Popen[bytes]:
    """A shell that kills `process` when this one dies without a word, and ends when it is told a line."""
    return subprocess.Popen(
        ["sh", "-c", 'read -r _ || kill -9 "$0"', str(process)], stdin=subprocess.PIPE, start_new_session=True
    )
