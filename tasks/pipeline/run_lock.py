"""One run at a time per folder: two would overwrite each other's results; and one `python -m flows serve`.

A flow, or a stage run by hand, locks `artifacts/.flow.lock`; the kernel frees it however the process ends. A stage that
the flow started shares the flow's lock, on another machine too: the flow passes a random token down, which is in the
file. The owner's process id and command are there for the message, and the id to see whether the owner was killed and
its guardian is still ending its children. POSIX only.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tasks.core.surroundings import check_place
from tasks.core.workspace import as_shell_sees

FLOW_VARIABLE = "TURNWISE_FLOW"  # a flow's token, which it sets for its children
COMMAND = re.compile(r"[a-z][a-z_-]{1,30}")  # `doctor`, `run`; other text of the file is not shown
HANDOVER_SECONDS = 15.0  # how long to wait for the children of a killed owner


class FolderLock(NamedTuple):
    """`harm`: what a second owner would do."""

    file: str
    owner: str
    harm: str


RUN = FolderLock(".flow.lock", "run", "two at once would overwrite each other's results")
SERVE = FolderLock(".serve.lock", "`serve`", "a second one would end its schedule")
_held: dict[Path, int] = {}  # by this process: the kernel would let it wait for itself


class AnotherRun(ValueError):
    """Another has the folder's lock. `found`: without what to do."""

    def __init__(self, found: str):
        super().__init__(f"{found}. Wait for it or stop it, then run again.")
        self.found = found


@contextmanager
def only_run(artifacts: Path, lock: FolderLock = RUN) -> Iterator[int]:
    """Take the folder's lock, or share the flow's if this is its child; yields the file descriptor. Reentrant."""
    check_place(artifacts)
    file = artifacts.resolve() / lock.file
    if file in _held:
        yield _held[file]
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _share_or_take(descriptor, artifacts, lock)
        _held[file] = descriptor
        yield descriptor
    finally:
        _held.pop(file, None)
        os.close(descriptor)


@contextmanager
def look_for_owner(artifacts: Path, lock: FolderLock) -> Iterator[bool]:
    """Whether a process has the lock. Where none has, none gets it during the block: it waits for the end, since no
    owner is noted. Any number may look at once. OSError where the folder cannot be read or written.
    """
    descriptor = os.open(artifacts / lock.file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_free = _try_to_take(descriptor, fcntl.LOCK_SH)
        if is_free:
            os.ftruncate(descriptor, 0)  # the last owner is gone, and another process may have its id
        yield not is_free
    finally:
        os.close(descriptor)


@cache
def own_token() -> str:
    """Of this process, for FLOW_VARIABLE of its children: a process id may be another's on another machine."""
    return secrets.token_hex(16)


class _Owner(NamedTuple):
    pid: str
    token: str
    command: str


def _share_or_take(descriptor: int, artifacts: Path, lock: FolderLock) -> None:
    """Share the lock of the flow that started this process, by any number of others; another flow's token is none."""
    deadline = time.monotonic() + HANDOVER_SECONDS
    while True:
        is_free, owner = _try_to_take(descriptor), _owner(descriptor)
        is_under_flow = bool(owner.token) and owner.token == os.environ.get(FLOW_VARIABLE)
        if is_free and not is_under_flow:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {own_token()} {_own_command()}".encode(), 0)
        if is_free or is_under_flow:
            return
        if _is_alive(owner.pid) or time.monotonic() > deadline:
            own = f"`{owner.command}`"
            told = f": {own}" if COMMAND.fullmatch(owner.command) and own != lock.owner else ""
            raise AnotherRun(
                f"{as_shell_sees(artifacts)}: another {lock.owner} (process {owner.pid or 'unknown'}{told}) is at work "
                f"in this folder, and {lock.harm}"
            )
        time.sleep(0.1)


def _try_to_take(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(descriptor: int) -> _Owner:
    parts = os.pread(descriptor, 100, 0).decode(errors="replace").split()
    pid, token, command = [*parts, "", "", ""][:3]
    return _Owner(pid, token, command)


def _own_command() -> str:
    """Of `python -m tasks` or `python -m flows`; empty for another program."""
    program, first, *_ = [*sys.argv, "", ""]
    is_ours = program == "tasks" or program.endswith(("tasks/__main__.py", "flows/__main__.py"))  # a fork, a process
    return first if is_ours and COMMAND.fullmatch(first) else ""


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
