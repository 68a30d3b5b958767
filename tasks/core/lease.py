"""A process that ends by itself where whoever asked for it is no longer there, even if the network is what is gone."""

from __future__ import annotations

import os
import threading
import time

LOOK_SECONDS = 1.0
LAPSED_STATUS = 70  # of sysexits: an internal error


class Lease:
    """Ends this process `seconds` after the last `renew`; its guardian (`child_processes.py`) ends its children."""

    def __init__(self, seconds: float):
        self.seconds, self.renewed = seconds, time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def renew(self) -> None:
        self.renewed = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self.renewed < self.seconds:
            time.sleep(LOOK_SECONDS)
        os._exit(LAPSED_STATUS)
