"""Watching the process vLLM computes in: whoever waits for it is told of its death, and it never outlives this process.

vLLM 0.32 leaves a caller waiting for ever when its engine core is killed (its monitor closes the connection and wakes
nobody), and a core whose parent is killed goes on living, with all its memory, also where that was while it started.
Each was measured.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Lock, Thread

from tasks.engines.vllm.shared import private_folder, private_sockets

TICK_SECONDS = 1.0
KILL_UNLESS_TOLD = """
read -r _ || grep -lsF "$0" /proc/[0-9]*/environ | while IFS=/ read -r _ _ process _; do kill -9 "$process"; done
rm -rf "$1"
"""


class Guard:
    """A shell that kills every process with `variables` in its environment when this one dies without a word, and ends
    when it is told a line. It is there before they are started, and so knows them from their first moment (Linux). The
    folder of their sockets ends with it.
    """

    def __init__(self) -> None:
        name, value = "TURNWISE_GUARD", f"{os.getpid()}-{uuid.uuid4().hex}"
        self.folder = private_folder()
        self.variables = {name: value, **private_sockets(self.folder)}
        command = ["sh", "-c", KILL_UNLESS_TOLD, f"{name}={value}", str(self.folder)]
        self.shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.dismissal = Lock()

    def dismiss(self) -> None:
        with self.dismissal:
            if self.shell.poll() is None:
                self.shell.communicate(b"\n")


class CoreWatch:
    """A thread beside `core`: calls `on_death` once it has ended, and kills it after `timeout_seconds` of silence while
    it is waited for. Silence is counted in ticks of this process, so that one which was stopped itself blames nobody.
    """

    def __init__(self, core: BaseProcess, guard: Guard, *, on_death: Callable[[], None], timeout_seconds: float):
        self.core, self.on_death, self.timeout_seconds = core, on_death, timeout_seconds
        self.is_awaited, self.silent_seconds = False, 0.0
        self.guard = guard
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
        self.guard.dismiss()

    def _watch(self) -> None:
        while not wait([self.core.sentinel], timeout=TICK_SECONDS):
            self.silent_seconds += TICK_SECONDS
            if self.is_awaited and self.silent_seconds > self.timeout_seconds:
                self.core.kill()
        self.on_death()
