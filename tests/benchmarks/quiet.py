"""Seconds as on a quiet machine: less those in which a thread could have run and the kernel ran others' instead.

Linux counts them per thread (/proc/self/task/ID/schedstat, the second number, nanoseconds). What a thread waits for
another thread or process that was itself kept from running is still in it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path


def delay_seconds(thread: int | None = None) -> float:
    """Of a thread (its native number) of this process so far, else this one; 0 where none is counted."""
    counted = Path(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat")
    return int(counted.read_text().split()[1]) / 1e9 if counted.exists() else 0.0


def quiet_now(thread: int | None = None) -> float:
    """A clock that stands still while the thread waits for a processor."""
    while True:
        before, now = delay_seconds(thread), time.perf_counter()
        if delay_seconds(thread) == before:
            return now - before
