"""The journal of a registered model: every decision and every move of its aliases, in order.

A JSON-lines file in an MLflow run called "journal of NAME"; entries are never removed. Two file names are written in
turn, so the file in use is never being written. Two tags, the run's and then the registered model's, name the file, its
number of entries, its SHA-256 and that of the file before. An entry counts once the first is set; of two that differ
the one with more entries counts, if its file has that hash. So a kill leaves the journal with or without its entry, and
`mend` repairs a tag edited in MLflow. Where no file has its hash, LostJournal contains what can still be verified.
Appending needs the lock (`registry_lock.py`) and is idempotent by id.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from tasks.core.text import counted
from tasks.tracking.connection import mlflow_errors, or_none, refuse_moved_files
from tasks.tracking.journal_files import (
    FILES,
    Pointer,
    hash_of,
    parse_pointer,
    read_still_verified,
    read_verified,
    sync_file,
)
from tasks.tracking.metrics import log_table

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.registry_lock import RegistryLock

Kind = Literal[
    "decision", "promotion", "rollback", "waiting", "approval", "withdrawal", "adoption", "restoration", "hold",
    "release", "test_set", "look", "pruning",
]  # fmt: skip
POINTER = "promotion.journal"  # the tag of the registered model, and of the run
OWNER = "promotion.journal_of"  # a tag of the run: the registered model
TABLE = "journal.json"  # the same as a table, for MLflow's page
NUM_READS = 5  # a quick writer may replace the file while it is read
MAX_REASON = 1000  # characters of an entry's reason, which is also a tag


@dataclass(frozen=True, slots=True)
class Entry:
    """What happened (`kind`, `body`: plain JSON), when (UTC, to the millisecond) and by whom (user@host)."""

    id: str
    kind: str
    at: str
    by: str
    body: dict[str, Any]

    def without_tags(self) -> dict[str, Any]:
        return {name: value for name, value in self.body.items() if name != "kept"}


class LostJournal(ValueError):
    """The journal's file is gone or altered. `entries` are those that can still be verified, the oldest ones; of the
    others `num_lost` are known to have been there.
    """

    def __init__(self, message: str, entries: list[Entry], num_lost: int):
        super().__init__(message)
        self.entries, self.num_lost = entries, num_lost


@dataclass(frozen=True, slots=True)
class Journal:
    """Every entry, the oldest first. `pointer` is None before the first entry; `faults` are tags to mend."""

    entries: list[Entry]
    pointer: Pointer | None
    faults: list[str]

    def is_at(self, tag: str | None) -> bool:
        """Whether the registered model's tag points here, with nothing to mend."""
        return tag is not None and not self.faults and self.pointer == parse_pointer(tag)

    def of(self, *kinds: Kind) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind in kinds]


def read_journal(registry: Registry) -> Journal:
    """The journal, verified. LostJournal where it is gone or altered: to go on without the last entry could forget a
    hold or a defect, so a person decides that.
    """
    with mlflow_errors(registry.settings):
        for _ in range(NUM_READS):
            known: Journal | None = registry.journal
            if known and registry.is_locked and not known.faults:
                return known
            tag = registry.model_tags().get(POINTER)
            if known and known.is_at(tag):
                return known
            journal: Journal | None = _read(registry, tag)
            registry.journal = journal
            if journal is not None:
                return journal
            if tag == registry.model_tags().get(POINTER):
                break
        raise _lost(registry, tag)


def append(
    registry: Registry, lock: RegistryLock, kind: Kind, body: Mapping[str, Any], *, id: str | None = None
) -> Entry:
    return append_all(registry, lock, [new_entry(kind, body, id=id)])[0]


def append_all(registry: Registry, lock: RegistryLock, entries: Sequence[Entry]) -> list[Entry]:
    """Add several entries in one write, all or none; those already in the journal stay as they are."""
    journal = read_journal(registry)
    known = {entry.id: entry for entry in journal.entries}
    new = [entry for entry in entries if entry.id not in known]
    if new:
        _write(registry, lock, [*journal.entries, *new], journal.pointer)
    return [known.get(entry.id, entry) for entry in entries]


def begin_again(registry: Registry, lock: RegistryLock, entries: Sequence[Entry]) -> None:
    """Start a new journal of these entries in a new run; the old one stays in MLflow."""
    _write(registry, lock, entries, None)


def mend(registry: Registry, lock: RegistryLock) -> list[str]:
    """Set both tags to what the journal is; returns what was wrong, a sentence each. Called right after locking."""
    registry.journal = None
    journal = read_journal(registry)
    if journal.faults and journal.pointer:
        _point(registry, lock, journal.pointer)
    return journal.faults


def new_entry(kind: Kind, body: Mapping[str, Any], *, id: str | None = None, by: str | None = None) -> Entry:
    """An entry of now, by whoever runs this unless `by` names somebody else."""
    assert kind in get_args(Kind)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    plain = json.loads(json.dumps(dict(body), allow_nan=False))  # as it is read back
    return Entry(id or uuid.uuid4().hex, kind, now, by or operator(), plain)


def operator() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without such a user
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _read(registry: Registry, tag: str | None) -> Journal | None:
    """The journal that the tags point to, empty before the first entry; None where it cannot be read."""
    found, of_model, of_run = _pointers(registry, tag)
    if tag is None and of_run is None:
        return Journal([], None, [])
    for pointer in sorted(found, key=lambda item: item.entries, reverse=True):
        content = read_verified(pointer)
        if content is not None:
            return Journal(_parse(content), pointer, _faults(registry, pointer, of_model, of_run, tag))
    return None


def _pointers(registry: Registry, tag: str | None) -> tuple[set[Pointer], Pointer | None, Pointer | None]:
    """What the two tags say: together, the registered model's, and the run's."""
    of_model = parse_pointer(tag)
    run = (_run(registry, of_model.run) if of_model else None) or newest_run(registry)
    of_run = parse_pointer(run.data.tags.get(POINTER)) if run else None
    return {pointer for pointer in (of_model, of_run) if pointer}, of_model, of_run


def _lost(registry: Registry, tag: str | None) -> LostJournal:
    """ValueError instead where the files are only elsewhere."""
    refuse_moved_files(registry.client, registry.settings)
    pointers = sorted(_pointers(registry, tag)[0], key=lambda item: item.entries)
    verified = max((_parse(read_still_verified(pointer)) for pointer in pointers), key=len, default=[])
    num_lost = max((pointer.entries for pointer in pointers), default=0) - len(verified)
    location = registry.settings.artifact_location
    unknown, way = "who was champion and why", "begin a new journal with the registry as it is"
    if verified:
        unknown = f"what was decided after its first {counted(len(verified), 'entry', 'entries')}"
        way = "go on from these entries and the registry as it is"
    return LostJournal(
        f"{registry.model}: the journal of its promotions is gone or altered ({POINTER} = {tag}), so it is unknown "
        f"{unknown}. Restore MLflow's database and {location} from one backup, or {way}: "
        f'python -m tasks registry adopt --reason "…".',
        verified,
        num_lost,
    )


def _faults(
    registry: Registry, pointer: Pointer, of_model: Pointer | None, of_run: Pointer | None, tag: str | None
) -> list[str]:
    if pointer == of_model == of_run:
        return []
    other, what = (of_model, f"registered model {registry.model}") if pointer != of_model else (of_run, "journal's run")
    if other and other.run == pointer.run and other.sha256 == pointer.sha256_before:
        return []  # a killed append, no edit
    found = "is gone" if (tag if other is of_model else other) is None else "was edited"
    return [f"the tag {POINTER} of the {what} {found}"]


def _write(registry: Registry, lock: RegistryLock, entries: Sequence[Entry], before: Pointer | None) -> None:
    registry.journal = None
    lines = "".join(json.dumps(asdict(entry), sort_keys=True, allow_nan=False) + "\n" for entry in entries)
    run = before.run if before else _make_run(registry, lock)
    file = FILES[FILES.index(before.file) - 1] if before else FILES[0]
    lock.check()
    registry.client.log_text(run, lines, file)
    log_table(registry.client, run, TABLE, [table_row(entry) for entry in entries])  # for people; no code reads it
    sync_file(registry.client.get_run(run).info.artifact_uri, file)
    pointer = Pointer(run, file, hash_of(lines.encode()), len(entries), before.sha256 if before else None)
    _point(registry, lock, pointer)
    registry.journal = Journal(list(entries), pointer, [])


def table_row(entry: Entry) -> dict[str, Any]:
    body = entry.without_tags()
    first = {name: body.pop(name, None) for name in ("version", "champion", "instead_of", "reason")}
    return {"at": entry.at, "kind": entry.kind, "by": entry.by, **first, "more": body}


def _point(registry: Registry, lock: RegistryLock, pointer: Pointer) -> None:
    text = json.dumps(pointer._asdict())
    run = registry.client.get_run(pointer.run)
    if run.info.lifecycle_stage == "deleted":  # by a click; a deleted run takes no tags
        lock.check()
        registry.client.restore_run(pointer.run)
    lock.check()
    registry.client.set_tag(pointer.run, POINTER, text)
    lock.check()
    registry.client.set_registered_model_tag(registry.model, POINTER, text)


def _make_run(registry: Registry, lock: RegistryLock) -> str:
    """A run for a new journal, ended at once since nothing runs. An empty one that a killed call left is reused."""
    left = newest_run(registry, is_empty=True)
    if left:
        return str(left.info.run_id)
    lock.check()
    client = registry.client
    tags = {OWNER: registry.model}
    run = client.create_run(registry.experiment_id, run_name=f"journal of {registry.model}", tags=tags).info.run_id
    client.set_terminated(run, "FINISHED")
    return str(run)


def _run(registry: Registry, run_id: str) -> Any:
    return or_none(lambda: registry.client.get_run(run_id))


def newest_run(registry: Registry, *, is_empty: bool = False) -> Any:
    """The newest journal of a model of this name, also one that was deleted on MLflow's page."""
    from mlflow.entities import ViewType

    experiment = registry.client.get_experiment_by_name(registry.settings.experiment)
    if experiment is None:
        return None
    named = f"tags.`{OWNER}` = '{registry.model}'"
    newest = ["attributes.start_time DESC"]
    view = ViewType.ACTIVE_ONLY if is_empty else ViewType.ALL
    found = registry.client.search_runs([experiment.experiment_id], named, view, order_by=newest)
    return next((run for run in found if (POINTER not in run.data.tags) == is_empty), None)


def _parse(content: bytes) -> list[Entry]:
    return [Entry(**json.loads(line)) for line in content.decode().split("\n") if line]
