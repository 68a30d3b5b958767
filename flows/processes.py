"""A stage as a child process: its output looks as it would without a flow, and it never outlives its flow.

The flow's guardian (`tasks/core/child_processes.py`) keeps the flow's lock until the last child is gone, so a new flow
in the same folder starts only then. Which commands are run is in `steps.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import re
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.server import OWN_SERVER_VARIABLE
from tasks.core import workspace
from tasks.core.child_processes import ChildProcess, Guardian
from tasks.core.terminal import tell
from tasks.core.text import visible
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tasks.pipeline.run_lock import FLOW_VARIABLE, only_run, own_token
from tasks.tracking.metrics import QUIET

PAUSE_SECONDS = 0.05  # an unfinished line is shown after this
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def child_environment() -> dict[str, str]:
    """`python` in dvc.yaml must be this interpreter; a stage and its tools must not know the password of Prefect's
    server. The same before and after the flow imports MLflow, or a server of forks that began before would refuse.
    """
    left_out = ("PREFECT_", OWN_SERVER_VARIABLE, workspace.VARIABLE)  # a worker may have been given another workspace
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    env = {**TELEMETRY_OFF, **QUIET, **kept}  # a Prefect worker did not run our command line
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    env[FLOW_VARIABLE] = own_token()
    return {**env, **workspace.dvc_variables()}


class OutOfTime(Exception):
    """A child ran longer than it may, and was ended with all that it had started."""


@contextmanager
def only_flow(artifacts: Path) -> Iterator[Guardian]:
    """Take the folder's lock and start the guardian; ValueError where another run has the lock."""
    with only_run(artifacts) as lock, contextlib.closing(Guardian(keep_open=[lock])) as guardian:
        yield guardian


def run_streamed(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    guardian: Guardian,
    on_line: Callable[[str], bool],
    is_terminal: bool,
    timeout_seconds: float | None = None,
) -> int:
    """Run `command` to its end; returns its exit status. Standard output and error come together, in order. OutOfTime
    where it runs longer than `timeout_seconds`.

    `on_line` gets each finished line as plain text and returns whether to show it. With `is_terminal` the child has its
    own pseudo-terminal, and its bytes are passed on as they come, so that progress bars move.
    """
    reader, writer = _open_terminal() if is_terminal else os.pipe()
    child = ChildProcess(command, guardian=guardian, env=env, output=writer)
    os.close(writer)
    show = _Screen(on_line) if is_terminal else _Lines(on_line)
    try:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        for chunk in _read_until_end(reader, child):
            show(chunk)
            if time.monotonic() > deadline:
                raise OutOfTime
        show.finish()
        return child.wait()
    finally:
        child.stop()
        os.close(reader)


def _open_terminal() -> tuple[int, int]:
    reader, writer = pty.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # the real terminal adds the carriage returns
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


def _read_until_end(reader: int, child: ChildProcess) -> Iterator[bytes]:
    """Yield what the child writes, b"" while it pauses, until it ends (a grandchild may keep the pipe open)."""
    while True:
        has_ended = not child.is_alive()
        ready, _, _ = select.select([reader], [], [], 0 if has_ended else PAUSE_SECONDS)
        if ready:
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # a pseudo-terminal whose last writer is gone
                chunk = b""
            if not chunk:
                return
            yield chunk
        elif has_ended:
            return
        else:
            yield b""


class _Lines:
    def __init__(self, on_line: Callable[[str], bool]):
        self.on_line, self.rest = on_line, b""

    def __call__(self, chunk: bytes) -> None:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)

    def finish(self) -> None:
        if self.rest:
            self._line(self.rest)

    def _line(self, line: bytes) -> None:
        text = plain(line)
        if self.on_line(text):
            tell(text)


class _Screen:
    """Passes bytes on unchanged: a line once it is whole, or what there is of it after a pause (a progress bar)."""

    def __init__(self, on_line: Callable[[str], bool]):
        self.on_line, self.shown, self.waiting = on_line, b"", b""

    def __call__(self, chunk: bytes) -> None:
        *lines, self.waiting = (self.waiting + chunk).split(b"\n")
        for line in lines:
            is_wanted = self.on_line(plain(self.shown + line))
            # A hidden line's control sequences are still passed on: one may show the cursor again.
            self._write(line + b"\n" if is_wanted or plain(self.shown) else b"".join(ANSI.findall(line)))
            self.shown = b""
        if not chunk or len(self.waiting) > 4096:
            self._write(self.waiting)
            self.shown, self.waiting = self.shown + self.waiting, b""

    def finish(self) -> None:
        self(b"")
        if plain(self.shown):
            self._write(b"\n")

    @staticmethod
    def _write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def plain(line: bytes) -> str:
    """The line as a reader sees it at the end: no colours, overwritten text gone, control characters made visible."""
    return visible(ANSI.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace"))
