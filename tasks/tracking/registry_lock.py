"""A lock on one registered model, so that only one process on any machine moves its aliases.

MLflow has no compare-and-set, but a tag of a registered model is one row under its own key. A lock is such a tag under
a random key, with a place in the line and whether it holds the registry. The first in the line writes that it holds,
then reads all locks, and holds only if no other one does; else it takes that back and waits. Of two that write at once
the later reader sees the other. A lock is deleted by its own key, so a late deletion never hits its successor.

A lock is dead where its process is gone (`processes.py`), after STALE_SECONDS, or where its text is malformed; a
waiting one rewrites itself and is skipped when it falls silent. A lock that could not be deleted, as where the database
is busy, is ignored by its own process, which tries again in a thread: for others its holder lives.
`RegistryLock.check`, called before every write, forbids writing after HOLD_SECONDS or without the lock. One gap
remains: a process stopped for ten minutes between that check and its one write. Clocks of machines must agree within
ten minutes.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.core.processes import is_gone, this_process
from tasks.tracking.connection import or_none

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK = "promotion.lock."
WAIT_SECONDS = 60.0  # while the line does not move; one is held for seconds
POLL_SECONDS = 0.05  # per lock ahead in the line, up to ten times that
REFRESH_SECONDS = 10.0  # after which a waiting lock is rewritten
SILENT_SECONDS = 40.0  # after which a waiting lock that was not rewritten is skipped
HOLD_SECONDS = 300.0  # after which its holder writes nothing more
STALE_SECONDS = 900.0  # after which others take its holder for dead
RELEASE_SECONDS = 2.0  # between two tries to delete a lock
_abandoned: set[str] = set()  # keys of this process's locks that are still to be deleted


@dataclass(frozen=True, slots=True)
class Other:
    key: str
    text: str
    place: int
    holds: bool
    process: dict[str, Any]


class RegistryLock:
    def __init__(self, client: MlflowClient, model: str):
        self.client, self.model = client, model
        self.key = f"{LOCK}{uuid.uuid4().hex}"
        self.place, self.holds, self.text = 0, False, ""
        self.written = 0.0  # monotonic: others compare the time of day
        self.tags: dict[str, str] = {}  # of the registered model, as last read in the line
        self.seen: dict[str, tuple[str, float]] = {}  # another lock's text, and since when

    def check(self) -> None:
        """ValueError where this lock no longer gives the right to write."""
        is_there = self.client.get_registered_model(self.model).tags.get(self.key) == self.text
        if not (is_there and self.holds) or time.monotonic() - self.written > HOLD_SECONDS:
            raise ValueError(
                f"{self.model}: this promotion was interrupted for so long that another may have begun, so it moves "
                f"nothing more. Run it again: that first completes what was left half done."
            )

    def write(self, *, holds: bool) -> None:
        self.holds, self.written = holds, time.monotonic()
        self.text = json.dumps({**_signed(time.time()), "place": self.place, "holds": holds})
        self.client.set_registered_model_tag(self.model, self.key, self.text)

    def delete(self) -> None:
        or_none(lambda: self.client.delete_registered_model_tag(self.model, self.key))  # None: no such model any more


@contextmanager
def hold_lock(client: MlflowClient, model: str) -> Iterator[RegistryLock]:
    """Hold the registered model, which must exist; ValueError where another promotion does not release it."""
    from mlflow.exceptions import MlflowException

    lock = RegistryLock(client, model)
    try:
        _take(lock)
        yield lock
    finally:
        try:
            lock.delete()
        except MlflowException:
            _abandoned.add(lock.key)
            threading.Thread(target=_delete_later, args=(lock,), daemon=True).start()


def _delete_later(lock: RegistryLock) -> None:
    """Delete an abandoned lock as soon as that is possible, at the latest when it counts as dead anyway."""
    from mlflow.exceptions import MlflowException

    for _ in range(int(STALE_SECONDS / RELEASE_SECONDS)):
        time.sleep(RELEASE_SECONDS)
        with suppress(MlflowException):
            lock.delete()
            break
    _abandoned.discard(lock.key)


def _take(lock: RegistryLock) -> None:
    _, others = _read(lock)
    lock.place = 1 + max((other.place for other in others), default=0)
    lock.write(holds=not others)
    first, deadline = "", time.monotonic() + WAIT_SECONDS
    while True:
        is_there, others = _read(lock)
        if lock.holds and is_there and not any(other.holds for other in others):
            return
        ahead = _ahead(lock, others)
        if not ahead and not lock.holds:
            lock.write(holds=True)
            continue
        if lock.holds or not is_there or time.monotonic() - lock.written > REFRESH_SECONDS:
            lock.write(holds=False)
        if ahead and ahead[0].key != first:
            first, deadline = ahead[0].key, time.monotonic() + WAIT_SECONDS
        if ahead and time.monotonic() > deadline:
            raise ValueError(_told(lock, ahead))
        time.sleep(POLL_SECONDS * min(10, 1 + len(ahead)))


def _ahead(lock: RegistryLock, others: list[Other]) -> list[Other]:
    ahead = [other for other in others if other.holds or (other.place, other.key) < (lock.place, lock.key)]
    return sorted(ahead, key=lambda other: (not other.holds, other.place, other.key))


def _read(lock: RegistryLock) -> tuple[bool, list[Other]]:
    """Whether this lock is still as written, and the other living locks; dead and abandoned ones are deleted."""
    others, now = [], time.monotonic()
    lock.tags = dict(lock.client.get_registered_model(lock.model).tags)
    for key, text in lock.tags.items():
        if not key.startswith(LOCK) or key == lock.key:
            continue
        other = None if key in _abandoned else _parse(key, text)
        if other is None:
            lock.client.delete_registered_model_tag(lock.model, key)
            continue
        if lock.seen.get(key, ("", 0.0))[0] != text:
            lock.seen[key] = (text, now)
        if other.holds or now - lock.seen[key][1] < SILENT_SECONDS:
            others.append(other)
    return lock.tags.get(lock.key) == lock.text, others


def _parse(key: str, text: str) -> Other | None:
    try:
        said = dict(json.loads(text))
        if _is_dead(said):
            return None
        return Other(key, text, int(said["place"]), bool(said["holds"]), said)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _told(lock: RegistryLock, ahead: list[Other]) -> str:
    process = ahead[0].process
    line = f", and {len(ahead) - 1} more wait before this one" if len(ahead) > 1 else ""
    return (
        f"{lock.model}: another promotion (process {process['pid']} on {process['host']}, begun "
        f"{_moment(process['at'])}) has locked the registry{line}; two at once could both become champion. Wait for it "
        f"or end it, then run again; from {_moment(process['at'] + STALE_SECONDS)} on it counts as dead."
    )


def _signed(now: float) -> dict[str, Any]:
    return {**this_process(), "at": now}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Also one from the future, which would never become stale."""
    return not -STALE_SECONDS <= holder["at"] - time.time() <= STALE_SECONDS or is_gone(holder)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
