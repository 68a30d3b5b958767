"""Child processes that end, with everything they started, when this process ends. POSIX only.

Each child has its own session and process group, so Ctrl-C does not reach it. `stop` sends SIGTERM to the group, waits,
then kills it. After `kill -9` of this process, a guardian (`guardian.py`) ends the groups: it waits on a pipe that the
kernel closes with this process.

    child = ChildProcess(command, log=Path("server.log"))  # without a log it writes where this process does
    if not child.is_alive():
        raise ValueError(f"the server {child.how_it_ended()}: {child.last_lines()}")
    child.stop()  # also after its end: what it started ends too

For processes that a library starts in this group, such as vLLM's engine core, call
`own_guardian().watch_descendants()`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from tasks.core import guardian as guardian_program

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
KILLED_SECONDS = 2.0  # a large process needs some of them to give its memory back; one that nobody reaps stays
LOOK_SECONDS = 0.02
LINE_LENGTH = 300  # characters per line of a log


class Guardian:
    def __init__(self, keep_open: Sequence[int] = (), *, grace_seconds: float = GRACE_SECONDS):
        """`keep_open`: file descriptors, such as a lock's, to keep open until all processes have ended."""
        command = [sys.executable, "-I", "-S", guardian_program.__file__, str(os.getpid()), str(grace_seconds)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=keep_open,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int, *, folder: Path | None = None) -> None:
        """End this group, and then remove the folder."""
        self._order(f"+{group} {folder or ''}")

    def forget(self, group: int) -> None:
        """The group has ended: another may get its number."""
        self._order(f"-{group}")

    def remove(self, folder: Path) -> None:
        self._order(f"/{folder}")

    def watch_descendants(self) -> None:
        """End all descendants of this process, looked up a few times per second."""
        self._order("*")

    def close(self) -> None:
        """End the remaining groups and wait. Descendants stay: this process lives."""
        self._order(".")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the guardian is closed or was killed
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def own_guardian() -> Guardian:
    """The guardian of this process, started on first use and closed at exit."""
    return _guardian_of(os.getpid())


@cache
def _guardian_of(pid: int) -> Guardian:  # per pid: a forked child gets its own
    guardian = Guardian()
    atexit.register(guardian.close)
    return guardian


class ChildProcess:
    """A running command. `output` and `errors`: file descriptors, `errors` that of `output` where it is None; `folder`:
    removed after the child.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        guardian: Guardian | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        output: int | None = None,
        errors: int | None = None,
        pass_fds: Sequence[int] = (),
        folder: Path | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ):
        self.guardian = guardian or own_guardian()
        self.log, self.folder, self.grace_seconds = log, folder, grace_seconds
        self._log_start = log.stat().st_size if log is not None and log.exists() else 0
        file = None if log is None else log.open("ab")

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file or output,
                stderr=file or (output if errors is None else errors),
                pass_fds=pass_fds,
                start_new_session=True,
            )
            self.guardian.watch(process.pid, folder=folder)
            return process

        try:
            # A signal's handler may raise in the main thread, after the start and before the guardian knows the child.
            with ThreadPoolExecutor(1) as undisturbed:
                self.process = undisturbed.submit(start).result()
        finally:
            if file is not None:
                file.close()
        self.pid, self._is_stopped = self.process.pid, False

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        return self.process.wait()

    def how_it_ended(self) -> str:
        """`ended with status 1`, or `was ended by signal 9`."""
        status = self.process.poll()
        return f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"

    def last_lines(self, count: int = 1, *, preferred: str = "") -> list[str]:
        """The last lines of its log, shortened; only those that contain `preferred`, if any do."""
        assert self.log is not None
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return [line[-LINE_LENGTH:] for line in ([line for line in lines if preferred in line] or lines)[-count:]]

    def stop(self) -> None:
        """End its whole group, by SIGTERM, then SIGKILL. Returns when it is gone; may be called again."""
        if self._is_stopped:  # another process may have its number now
            return
        self._is_stopped = True
        if self._signal(signal.SIGTERM) and not self._is_gone_within(self.grace_seconds):
            self._signal(signal.SIGKILL)
            self._is_gone_within(KILLED_SECONDS)
        self.process.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.guardian.forget(self.pid)

    def _is_gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._signal(0):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _signal(self, number: int) -> bool:
        self.process.poll()  # until polled, an ended leader counts as alive
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True
