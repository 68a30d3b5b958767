"""A child process whose output is read all the time, so that it never blocks; the end of it tells why it ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.core.child_processes import ChildProcess

KEPT_BYTES, PIECE_BYTES = 1 << 14, 1 << 16


class HeardProcess(ChildProcess):
    """`folder`: removed after it. OSError if it cannot be started."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], folder: Path | None = None):
        reading, writing = os.pipe()
        self._kept, self._is_cut = b"", False
        try:
            super().__init__(command, env=env, output=writing, folder=folder)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._listener = threading.Thread(target=self._listen, args=(reading,), name="output", daemon=True)
        self._listener.start()

    def last_words(self, count: int, *, wait_seconds: float) -> list[str]:
        """The last lines that it printed, waiting for the rest of them: what it started may hold its output open. The
        rest of a line that was cut is none: it may have half a secret, which is not recognised.
        """
        self._listener.join(wait_seconds)
        lines = self._kept.decode(errors="replace").splitlines()[self._is_cut :]
        return [line.strip() for line in lines if line.strip()][-count:]

    def _listen(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as output:
            while piece := output.read(PIECE_BYTES):
                whole = self._kept + piece
                self._is_cut = self._is_cut or len(whole) > KEPT_BYTES
                self._kept = whole[-KEPT_BYTES:]
