"""Runs a command that must not outlive whoever asked for it: `watchdog.py PARENT FOLDER COMMAND…`, in its own session.

A vLLM server is three processes and more; a parent ended by kill -9 cannot end them, and a server that is killed may
leave its workers behind, memory and all. So this small process stands between: when the parent is gone, or the command
has ended, or it is asked to (SIGTERM), it removes the command's folder and ends the whole process group, itself
included. Only the standard library is imported, so that it is up at once and costs nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

LOOK_AGAIN_SECONDS = 0.25
GRACE_SECONDS = 5.0  # to shut down in order, shared memory given back; then SIGKILL
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, folder: str, command: list[str]) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while child.poll() is None and os.getppid() == parent and not asked:
        time.sleep(LOOK_AGAIN_SECONDS)
    _end_group(child, folder)


def _end_group(child: subprocess.Popen[bytes], folder: str) -> None:
    if child.poll() is None:
        os.killpg(0, signal.SIGTERM)
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no end within {GRACE_SECONDS:g} s of SIGTERM; killed", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _die_with_parent() -> None:
    """Between fork and exec: the kernel ends the command if this process is killed itself (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
