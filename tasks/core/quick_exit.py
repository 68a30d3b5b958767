"""The end of a process that has loaded torch or MLflow. Python takes seconds to take every object apart, which the
system does in one step. All else that Python does at an exit is done first: threads are joined, callbacks of `atexit`
run, output is flushed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FLUSH_FAILED = 120  # Python's status where standard output cannot be flushed at an exit
_STATUS: list[int] = []  # none, or how the process ends


def prepare_quick_exit() -> None:
    """Call before other modules are imported: of the callbacks at an exit the first is run last."""
    atexit.register(_leave)


@contextmanager
def quick_exit() -> Iterator[None]:
    """Around all that a process does. Where it ends by an error or a signal, it ends in Python's way."""
    try:
        yield
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _STATUS.append(end.code or 0)
        raise
    _STATUS.append(0)


def _leave() -> None:
    if not _STATUS:
        return
    status = _STATUS[0]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = FLUSH_FAILED
    os._exit(status & 0xFF)
