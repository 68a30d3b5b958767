"""The thread that follows the alias: it looks the registry up, prepares what it leads to, and changes models.

What fails (an unreachable registry, a version that cannot be fetched or does not pass its probe) is told in one line,
once, and the model that answers goes on. What fails in passing, such as a download, is tried again at each look; a
version that cannot be made ready or does not pass its probe only when the alias moves.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

from tasks.commands.serve.loop import EngineLoop
from tasks.commands.serve.served import ModelHouse, Prepared
from tasks.commands.serve.versions import Found, Source
from tasks.core.terminal import tell, warn
from tasks.core.text import one_line

END_SECONDS = 5.0  # a download may take longer


class Watcher:
    """`look_again` has it look at once."""

    def __init__(self, source: Source, house: ModelHouse, loop: EngineLoop, *, poll_seconds: float):
        self.source, self.house, self.loop, self.poll_seconds = source, house, loop, poll_seconds
        self.trouble: str | None = None
        self.num_changes = 0
        self.changed_at: str | None = None
        self._refused: tuple[str, Path] | None = None  # the key of the version that would fail again
        self._wake, self._is_ending = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="alias-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look_again(self) -> None:
        self._wake.set()

    def end(self) -> None:
        """What it is preparing is given up."""
        self._is_ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._is_ending:
            self._wake.wait(self.poll_seconds)
            self._wake.clear()
            if not self._is_ending:
                self.look()

    def look(self) -> None:
        """Once: follow the alias where it leads elsewhere. Whatever fails, there is a next look."""
        try:
            self._follow()
        except Exception as error:
            self._tell_failed(error)

    def _follow(self) -> None:
        found = self.source.now()
        if found is None:
            return
        if found.key == (self.loop.served.version, self.loop.served.folder):
            self._refused = self.trouble = None
        elif found.key != self._refused:
            self._change_to(found)

    def _change_to(self, found: Found) -> None:
        before = self.loop.served
        try:
            folder = found.fetch()
        except Exception as error:
            self._tell_failed(error, f"{found.version} cannot be fetched: ")
            return
        try:
            prepared = self.house.prepare(found.version, folder, before)
            if not self._is_still_wanted(found, prepared):
                return
            self.loop.exchange(prepared).result()
        except Exception as error:  # whatever is wrong with its files or its engine, nobody may be left without a reply
            self._refused = found.key
            self._tell_failed(error, f"{found.version} is not served: ")
            return
        self._refused = self.trouble = None
        self.num_changes += 1
        self.changed_at = datetime.now(UTC).isoformat(timespec="seconds")
        tell(f"{self.changed_at} {found.version} answers now, {before.version} before it")
        self.source.tidy(folder, before.folder)  # a rollback leads to the one before

    def _is_still_wanted(self, found: Found, prepared: Prepared) -> bool:
        """Its files came and were loaded for minutes: where the alias has moved on since, by a rollback perhaps, it is
        dropped, and the next look comes at once.
        """
        try:
            now = self.source.now()
        except Exception as error:
            prepared.drop()
            self._tell_failed(error)
            return False
        if now is not None and now.key == found.key:
            return True
        prepared.drop()
        self.look_again()
        return False

    def _tell_failed(self, error: Exception, what: str = "") -> None:
        goes_on = f"{self.loop.served.version} goes on." if self.loop.fault is None else "Nothing is served any more."
        trouble = f"{what}{one_line(error, 400)} {goes_on}"
        if trouble != self.trouble and not self._is_ending:
            warn(f"warning: {trouble}")
        self.trouble = trouble
