"""One run at a time per folder: two would overwrite each other's results.

A flow, or a stage run by hand, locks `artifacts/.flow.lock`; the kernel frees it however the process ends. A stage that
the flow started shares the flow's lock. The file contains the owner's process id: for the message, and to see whether
the owner was killed and its guardian is still ending its children. POSIX only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.core.surroundings import check_place

FLOW_PID_VARIABLE = "TURNWISE_FLOW_PID"  # a flow sets it for its children
HANDOVER_SECONDS = 15.0  # how long to wait for the children of a killed owner

_held: dict[Path, int] = {}  # by this process: the kernel would let it wait for itself


class AnotherRun(ValueError):
    """Another run has the folder's lock."""


@contextmanager
def only_run(artifacts: Path) -> Iterator[int]:
    """Take the folder's lock, or share the flow's if this is its child; yields the file descriptor. Reentrant."""
    check_place(artifacts)
    folder = artifacts.resolve()
    if folder in _held:
        yield _held[folder]
        return
    descriptor = os.open(folder / ".flow.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _is_under_flow(descriptor):
            _take(descriptor, artifacts)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        _held[folder] = descriptor
        yield descriptor
    finally:
        _held.pop(folder, None)
        os.close(descriptor)


def _is_under_flow(descriptor: int) -> bool:
    """Whether the flow that started this process has the lock; another flow's variable does not count."""
    flow = os.environ.get(FLOW_PID_VARIABLE, "")
    return flow == _holder(descriptor) and _is_alive(flow)


def _take(descriptor: int, artifacts: Path) -> None:
    deadline = time.monotonic() + HANDOVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(descriptor)
            if _is_alive(holder) or time.monotonic() > deadline:
                raise AnotherRun(
                    f"{artifacts}: another run (process {holder or 'unknown'}) is at work in this folder, and two at "
                    f"once would overwrite each other's results. Wait for it or stop it, then run again."
                ) from None
            time.sleep(0.1)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace").strip()


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
