"""The file that a server records in: a row is one write, a full file gets a number, and only its owner may read it.

Whoever harvests may move or remove the file while the server goes on: the next row begins it anew. One server records
in a folder. The lock is a file of its own, since the current one may go at any time.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.core.terminal import warn
from tasks.core.text import one_line

CURRENT, FULL, LOCK = "conversations.jsonl", "conversations-{:06}.jsonl", ".lock"


class RowFile:
    """ValueError where nothing can be written in `folder`, or another server records there."""

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.path, self.max_bytes = folder, folder / CURRENT, max_bytes
        self._lock: int | None = None
        self._rows: int | None = None
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ValueError(
                f"--record {folder}: nothing can be written there ({one_line(error)}), so nothing would be recorded. "
                f"Name a folder of your own."
            ) from None

    def let_go_of_moved(self) -> bool:
        """Whether somebody moved or removed the file since the row before, which is told."""
        if self._rows is None or _is_at(self.path, self._rows):
            return False
        warn(
            f"warning: {self.path} was moved or removed while conversations are recorded: it is begun anew, and each "
            f"of them from its first message."
        )
        self._close_rows()
        return True

    def append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")
        if self._rows is not None and 0 < os.fstat(self._rows).st_size > self.max_bytes - len(line):
            self._rotate()
        rows = self._open() if self._rows is None else self._rows
        size = os.fstat(rows).st_size
        try:
            if os.write(rows, line) < len(line):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(rows, size)  # no half row
            raise

    def close(self) -> None:
        self._close_rows()
        self._let_others_in()

    def _open(self) -> int:
        """What a killed server left of a row is cut off."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._keep_others_out()
        rows = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(rows, 0o600)  # of a file that was there, too
            with open(rows, "rb", closefd=False) as file:
                os.ftruncate(rows, file.read().rfind(b"\n") + 1)
        except BaseException:
            os.close(rows)
            raise
        self._rows = rows
        return rows

    def _keep_others_out(self) -> None:
        """By a lock that is found in `folder`: one that went with a moved folder keeps nobody out."""
        path = self.folder / LOCK
        if self._lock is not None and _is_at(path, self._lock):
            return
        self._let_others_in()
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ValueError(
                f"--record {self.folder}: another server records there, and two would mix their rows. Name another "
                f"folder."
            ) from None
        self._lock = lock

    def _let_others_in(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _close_rows(self) -> None:
        """What is closed is named no more: its number may be another file's, or a client's connection, at once."""
        rows, self._rows = self._rows, None
        if rows is not None:
            os.close(rows)

    def _rotate(self) -> None:
        taken = [
            int(file.stem[-6:]) for file in self.folder.glob("conversations-??????.jsonl") if file.stem[-6:].isdecimal()
        ]
        with suppress(FileNotFoundError):  # somebody has just moved it
            self.path.rename(self.folder / FULL.format(max(taken, default=0) + 1))
        self._close_rows()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
