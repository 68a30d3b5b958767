"""The process that a flow's stages, and DVC, are forks of (`tasks/core/fork_server.py`); it ends with the flow.

Where the machine has a GPU each stage starts by itself: a fork could not use a driver that a library has asked.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.processes import child_environment
from tasks.core.child_processes import ChildProcess, Guardian
from tasks.core.forked import VARIABLE
from tasks.core.settings import load_paths, read_params

RECIPE = "flows.loaded_early"
PATH_BYTES = 107  # of a Unix socket (unix(7))
NVIDIA = Path("/proc/driver/nvidia")
GRACE_SECONDS = 20.0  # to end what it forked, though a library that it loads may keep it for seconds


def forks_log() -> Path:
    """Which commands of the last flow were forked, and why others were not: those took seconds longer to start."""
    return load_paths(read_params()).artifacts / ".forks.log"


class ForkServer:
    """`variables`: what tells a command that it can ask. None where forks are not used here."""

    def __init__(
        self, guardian: Guardian, log: Path, expected: Sequence[str] = (), env: Mapping[str, str] | None = None
    ):
        """`log` gets a line per command. `expected`: those whose libraries are loaded at once, while nobody asks;
        `env`: of those that ask.
        """
        env = child_environment() if env is None else env
        self.variables: dict[str, str] = {}
        self._child: ChildProcess | None = None
        if VARIABLE in env:  # one is at work already
            return
        folder = Path(tempfile.mkdtemp(prefix="turnwise-forks-"))
        path = folder / "socket"
        if sys.platform != "linux" or NVIDIA.exists() or len(str(path).encode()) > PATH_BYTES:
            folder.rmdir()
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            number = listener.fileno()
            self._child = ChildProcess(
                [sys.executable, "-m", "tasks.core.fork_server", str(number), RECIPE, *expected],
                guardian=guardian,
                env={**env, "PYTHONHASHSEED": "0"},
                log=log,
                pass_fds=[number],
                folder=folder,
                grace_seconds=GRACE_SECONDS,
            )
        self.variables[VARIABLE] = str(path)

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()
