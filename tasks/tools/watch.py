"""Tells of a tool that does not come back. A handler in memory is called with no clock, since it takes microseconds:
one that waits for something would stop everything, without a word.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.core.terminal import warn

SILENT_SECONDS = 15.0
LOOK_SECONDS = 1.0


class _Watch:
    """One for a process: `tool` is called since `began`. A fork starts a thread of its own."""

    def __init__(self) -> None:
        self.tool, self.began, self.process = "", 0.0, 0

    def start(self) -> None:
        self.process = os.getpid()
        threading.Thread(target=self._look, name="tools", daemon=True).start()

    def _look(self) -> None:
        told = 0.0
        while True:
            time.sleep(LOOK_SECONDS)
            tool, began = self.tool, self.began
            if tool and began != told and time.monotonic() - began > SILENT_SECONDS:
                told = began
                warn(
                    f"warning: the tool {tool} has not answered for {SILENT_SECONDS:.0f} s, and nothing else is played "
                    f"meanwhile. environment.tools.timeout_seconds bounds tools that wait: write it as `async def`, or "
                    f"declare it with blocking=True."
                )


_WATCH = _Watch()


@contextmanager
def watched(tool: str) -> Iterator[None]:
    """Around a call that should take no time."""
    if _WATCH.process != os.getpid():
        _WATCH.start()
    outer = _WATCH.tool, _WATCH.began  # of another thread; the latest is told of
    _WATCH.began, _WATCH.tool = time.monotonic(), tool
    try:
        yield
    finally:
        _WATCH.tool, _WATCH.began = outer
