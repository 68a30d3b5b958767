"""A rank on a node of Ray's cluster: an actor with the same command as its child process (`on_ray.py` places it).

The child is no actor itself: it can be killed, and end, as under torchrun, and nothing of a step passes through Ray but
what it prints.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tasks.core.child_processes import ChildProcess
from tasks.core.files import read_json
from tasks.core.lease import Lease
from tasks.pipeline.supervise import MESSAGE_FILE, Ending, ending_of

NEWS_SECONDS, LOOK_SECONDS = 0.5, 0.02  # a look waits so long for news
LAST_OUTPUT_SECONDS = 1.0  # after the end of the rank, while something that it started still has its pipe
PIECE_BYTES = 1 << 16


class News(NamedTuple):
    """What the rank has written since the last look, and its end."""

    output: bytes
    errors: bytes
    ending: Ending | None


class RankHost:
    """The actor. `folder`: of the project, at the same path on every node."""

    def __init__(self, folder: str, lease_seconds: float):
        os.chdir(folder)
        self.lease = Lease(lease_seconds)
        self.rank, self.message_file = -1, Path()
        self.child: ChildProcess | None = None
        self.written = (bytearray(), bytearray())
        self.readers: list[threading.Thread] = []

    def meeting_place(self) -> tuple[str, str, int]:
        """Its node's name and address, and a port that is free there."""
        import ray.util

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return socket.gethostname(), ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, rank: int, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """`python -m tasks …` with these variables over those of the node."""
        folder = Path(tempfile.mkdtemp(prefix="turnwise-rank-"))
        self.rank, self.message_file = rank, folder / "message.json"
        pipes = [os.pipe(), os.pipe()]
        self.child = ChildProcess(
            [sys.executable, "-m", "tasks", *arguments],
            env={**os.environ, **variables, MESSAGE_FILE: str(self.message_file)},
            output=pipes[0][1],
            errors=pipes[1][1],
            folder=folder,
        )
        for (end, start), written in zip(pipes, self.written, strict=True):
            os.close(start)
            self.readers.append(threading.Thread(target=_read, args=(end, written), daemon=True))
            self.readers[-1].start()

    def renew(self) -> None:
        """The launcher is there."""
        self.lease.renew()

    def look(self) -> News:
        """At once where there is news, else after a moment."""
        assert self.child is not None
        deadline = time.monotonic() + NEWS_SECONDS
        while self.child.is_alive() and not any(self.written) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        ending = None if self.child.is_alive() else self._ending()
        output, errors = map(_take, self.written)
        return News(output, errors, ending)

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()

    def _ending(self) -> Ending:
        assert self.child is not None
        for reader in self.readers:
            reader.join(LAST_OUTPUT_SECONDS)
        told = read_json(self.message_file) if self.message_file.exists() else {}
        return ending_of(self.rank, self.child.wait(), told)


def _read(end: int, written: bytearray) -> None:
    while piece := os.read(end, PIECE_BYTES):
        written += piece
    os.close(end)


def _take(written: bytearray) -> bytes:
    taken = bytes(written)
    del written[: len(taken)]
    return taken
