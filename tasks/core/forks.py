"""A fork of the fork server (`fork_server.py`): whether one can be made, how it becomes what `python -m` would have
started, and, in the server, what it is told and how it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasks.core.fork_request import IS_FORK, STREAMS, Request

GRACE_SECONDS, KILLED_SECONDS = 2.0, 1.0  # for what a fork leaves behind, then for the killed to be gone
OF_JEMALLOC = "jemalloc_bg_thd"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # prctl(2)


class Fork:
    """A command at work for the asker on the other side of `connection`."""

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self.connection = pid, connection
        self.status: int | None = None
        self.is_told = False  # to end, by its asker
        self.deadline = 0.0

    def signal(self, number: int) -> bool:
        """Whether there is one left in its group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def obey(self) -> None:
        """Pass on what the asker says; without an asker there is no fork."""
        try:
            told = self.connection.recv(64)
        except OSError:
            told = b""
        for number in told:
            self.is_told = True
            self.signal(number)
        if not told:
            self.signal(signal.SIGKILL)

    def note_end(self, status: int) -> None:
        self.status, self.deadline = status, time.monotonic() + GRACE_SECONDS
        if not self.is_told:
            self.signal(signal.SIGTERM)

    def has_ended(self) -> bool:
        """It and all that it left in its group, which has a moment to go. A zombie stays in its group, and may have
        nobody who waits for it, such as the first process of a container.
        """
        if self.status is None:
            return False
        late = time.monotonic() - self.deadline
        if late > 0:
            self.signal(signal.SIGKILL)
        return late > KILLED_SECONDS or not self.signal(0)

    def report(self) -> None:
        with suppress(OSError):
            self.connection.sendall(json.dumps(self.status).encode() + b"\n")
        self.connection.close()


def has_other_threads() -> bool:
    """Whether a fork would lose a thread that somebody waits for. Those of OpenBLAS end before any fork, so one is made
    to tell them from others; jemalloc, which pyarrow has, does without its own after one.
    """
    if _num_threads() > 1:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    return _num_threads() > 1


def _num_threads() -> int:
    names = [Path(f"/proc/self/task/{name}/comm").read_text().strip() for name in os.listdir("/proc/self/task")]
    return len(names) - names.count(OF_JEMALLOC)


def become(asked: Request, streams: Sequence[int], connection: socket.socket) -> None:
    """Make this fork what `python -m` would have started, and tell its asker, who else would start the command."""
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_NAME, " ".join(asked.command[:2]).encode()[:15])
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked.ignored else usual)
    os.environ.clear()
    os.environ.update(asked.environment, PYTHONHASHSEED="0")
    os.environ[IS_FORK] = str(os.getpid())
    os.chdir(asked.folder)
    os.umask(asked.umask)
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True, write_through=is_unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None
    sys.path[0] = asked.folder
    sys.argv[:] = asked.command
    sys.orig_argv[:] = [sys.executable, "-m", *asked.command]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tasks", "flows")]:
        del sys.modules[name]
    with suppress(OSError):
        connection.sendall(json.dumps(os.getpid()).encode() + b"\n")
    connection.close()
