"""Child processes that never outlive their flow, and whose output looks the way it would without one.

Each child leads a process group of its own, ended whole when its step ends, fails or is cancelled. For `kill -9` of
the flow, which runs no cleanup, a guardian waits at the end of a pipe: the kernel closes the pipe with the flow, and
the guardian ends every group it was told of. It also holds the flow's lock until then, so that a new flow in the same
folder starts only when the last of the old one is gone. POSIX only. Left out: what the children are (`steps.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.core.terminal import tell
from tasks.core.text import visible
from tasks.pipeline.run_lock import only_run

PAUSE_SECONDS = 0.05  # an unfinished line is shown after this
GRACE_SECONDS = 2.0  # between asking a group to end and ending it
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")

# Runs without turnwise and without site-packages, so it starts in 20 ms and nothing can break it.
GUARDIAN = """
import os, signal, sys, time
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for signal_number in (signal.SIGTERM, signal.SIGKILL):
    for group in list(groups):
        try:
            os.killpg(group, signal_number)
        except ProcessLookupError:
            groups.discard(group)
    deadline = time.monotonic() + float(sys.argv[1])
    while groups and signal_number == signal.SIGTERM and time.monotonic() < deadline:
        time.sleep(0.05)
        for group in list(groups):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                groups.discard(group)
"""


class Guardian:
    """Ends the process groups it watches as soon as this process is gone, however it went."""

    def __init__(self, keep_open: Sequence[int] = ()):
        """`keep_open` are file descriptors the guardian holds too, such as a lock's."""
        command = [sys.executable, "-I", "-S", "-c", GUARDIAN, str(GRACE_SECONDS)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=keep_open,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group ended; its number may soon name someone else's."""
        self._tell(f"-{group}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a guardian someone killed must not end the flow it guards
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@contextmanager
def only_flow(artifacts: Path) -> Iterator[Guardian]:
    """The folder's one run, with its guardian; ValueError where another is at work."""
    with only_run(artifacts) as lock:
        guardian = Guardian(keep_open=[lock])
        try:
            yield guardian
        finally:
            guardian.close()


def run_streamed(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    guardian: Guardian,
    on_line: Callable[[str], bool],
    is_terminal: bool,
) -> int:
    """Run `command` to its end and give its exit status. Standard output and error come together, as they are written.

    `on_line` gets each finished line as plain text and says whether to show it. With `is_terminal` the child has a
    terminal of its own whose bytes are passed on as they come, so that its progress bars move as if it ran directly.
    """
    reader, writer = _open_terminal() if is_terminal else os.pipe()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=env, start_new_session=True
    )
    os.close(writer)
    guardian.watch(process.pid)
    show = _Screen(on_line) if is_terminal else _Lines(on_line)
    try:
        for chunk in _chunks(reader, process):
            show(chunk)
        show.finish()
        return process.wait()
    finally:
        _end_group(process)
        guardian.forget(process.pid)
        os.close(reader)


def _open_terminal() -> tuple[int, int]:
    """A pseudo-terminal as large as the real one, which leaves bytes as they are."""
    reader, writer = pty.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # the real terminal adds the carriage returns
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


def _chunks(reader: int, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What the child writes, b"" when it pauses, until it has ended (a grandchild may hold the other end longer)."""
    while True:
        has_ended = process.poll() is not None
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
    """Whole lines on standard output, in order."""

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
    """Bytes passed on as they are, a line once it is whole or once nothing more comes for a moment (a progress bar)."""

    def __init__(self, on_line: Callable[[str], bool]):
        self.on_line, self.shown, self.waiting = on_line, b"", b""

    def __call__(self, chunk: bytes) -> None:
        *lines, self.waiting = (self.waiting + chunk).split(b"\n")
        for line in lines:
            is_wanted = self.on_line(plain(self.shown + line))
            # The control sequences of a line nobody wants still count: one may show the cursor again.
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
    """What a reader of the line would see at the end: colours gone, and of what overwrote itself the last. Any other
    control character is shown: these lines go to Prefect's log too.
    """
    return visible(ANSI.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace"))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the child's group survives its step; asked first, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + (GRACE_SECONDS if number == signal.SIGTERM else 0)
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.02)
    process.wait()


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which would otherwise count as alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
