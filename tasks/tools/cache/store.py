"""Storage of the tool cache: the store that recording writes, and the frozen file that DVC versions.

An entry is a reply, a verdict or an environment, under the hash of what it answers. The store is one SQLite file
(diskcache) for any number of processes; nothing is evicted. Both contain JSON only: diskcache unpickles rows marked as
pickles, and a foreign file must not run code.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diskcache
from pydantic import Field, ValidationError, model_validator

from tasks.core import json_text
from tasks.core.aside import name_aside
from tasks.core.files import read_jsonl, write_jsonl
from tasks.core.records import Record
from tasks.tools.authoring import describe_tool
from tasks.tools.base import Environment, ErrorType, ToolReply, Verdict
from tasks.tools.settings import CacheSettings

INLINE = 1 << 30  # bytes: every value is in the database, so no row can name a file to read
KEY = re.compile(r"[0-9a-f]{64}")
NOT_JSON = (sqlite3.DatabaseError, zlib.error, ValueError, TypeError)


class StoredReply(Record):
    text: str
    valid: bool
    error: ErrorType | None


class StoredVerdict(Record):
    """The checks keep their order."""

    success: bool
    checks: dict[str, bool]
    details: dict[str, Any] = Field(default_factory=dict)


class StoredEnvironment(Record):
    """Replaces an environment that is off; the tools keep the order of the prompt. Older files lack the last two."""

    description: dict[str, Any]
    tools: list[dict[str, Any]]
    starts_afresh: bool = True
    is_live: bool = False

    @classmethod
    def of(cls, environment: Environment) -> StoredEnvironment:
        return cls(
            description=environment.describe(),
            tools=[{"name": tool.name, **describe_tool(tool)} for tool in environment.tools],
            starts_afresh=environment.starts_afresh(),
            is_live=environment.is_live(),
        )


class Entry(Record):
    """Exactly one of the three."""

    reply: StoredReply | None = None
    verdict: StoredVerdict | None = None
    environment: StoredEnvironment | None = None

    @model_validator(mode="after")
    def _check_one_answer(self) -> Entry:
        if len(self.to_row()) != 1:
            raise ValueError("it must contain exactly one of reply, verdict and environment")
        return self

    def to_row(self) -> dict[str, Any]:
        return {name: value.model_dump() for name, value in self if value is not None}


def entry_of(answer: ToolReply | Verdict | StoredEnvironment) -> Entry:
    """The number of retries is not kept."""
    if isinstance(answer, ToolReply):
        return Entry(reply=StoredReply(text=answer.text, valid=answer.valid, error=answer.error))
    if isinstance(answer, Verdict):
        return Entry(verdict=StoredVerdict(success=answer.success, checks=answer.checks, details=_details(answer)))
    return Entry(environment=answer)


def _details(verdict: Verdict) -> Any:
    try:
        return json_text.plain(verdict.details)
    except ValueError as error:
        raise ValueError(
            f"details of a verdict cannot be recorded ({error}), nor written in a trajectory. Have the episode's "
            f"verdict make them text, numbers, True, False, None, lists and dicts"
        ) from None


class ToolStore:
    """The store in one folder. ValueError if it is not one."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._cache = diskcache.Cache(
                folder, disk=_JSONOnly, disk_min_file_size=INLINE, eviction_policy="none", cull_limit=0
            )
        except NOT_JSON as error:
            raise self._unreadable(error) from None

    def get(self, key: str) -> Entry | None:
        try:
            row = self._cache.get(key, retry=True)
            return None if row is None else Entry.model_validate(row)
        except NOT_JSON as error:
            raise self._unreadable(error) from None

    def put(self, key: str, entry: Entry) -> bool:
        """Store an entry; True if it replaced one of another text: NaN is equal to nothing."""
        before, row = self.get(key), entry.to_row()
        differs = before is None or cache_key(before.to_row()) != cache_key(row)
        if differs:
            self._cache.set(key, row, retry=True)
        return before is not None and differs

    def entries(self) -> Iterator[tuple[str, Entry]]:
        try:
            keys = list(self._cache)
        except NOT_JSON as error:
            raise self._unreadable(error) from None
        for key in keys:
            entry = self.get(key)
            if entry is not None:
                yield key, entry

    def close(self) -> None:
        self._cache.close()

    def _unreadable(self, error: Exception) -> Exception:
        """The error itself if the machine is the cause (full disk, permission), else a ValueError."""
        if isinstance(error, sqlite3.OperationalError):
            return error
        aside = name_aside(self.folder.parent, f"{self.folder.name}-damaged")
        return ValueError(
            f"{self.folder}: contains data that the tool cache did not write ({type(error).__name__}), so no answer in "
            f"it can be trusted. What was recorded is lost unless it was frozen: move the folder aside with "
            f"`mv {shlex.quote(str(self.folder))} {shlex.quote(str(aside))}` and record again, or name another in "
            f"environment.cache.folder."
        )


class Answers:
    """The frozen file, then the store; in `strict` only the frozen file, which DVC versions, if there is one."""

    def __init__(self, settings: CacheSettings):
        folder, frozen = Path(settings.folder), settings.frozen_file
        self.is_strict = settings.mode == "strict"
        self.source = str(frozen or folder)
        self._frozen = read_frozen(frozen) if frozen and settings.mode != "record" else {}
        needs_store = not self.is_strict or (frozen is None and folder.is_dir())
        self._store = ToolStore(folder) if needs_store else None

    def get(self, key: str) -> Entry | None:
        return self._frozen.get(key) or (self._store.get(key) if self._store else None)

    def put(self, key: str, entry: Entry) -> bool:
        assert self._store is not None
        return self._store.put(key, entry)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class _JSONOnly(diskcache.JSONDisk):
    """Keys as text, values as compressed JSON; other rows are refused."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def get(self, key: str, raw: bool) -> str:
        if not raw:
            raise ValueError("a key that is not text")
        return key

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode != diskcache.core.MODE_RAW:
            raise ValueError("a value that is not JSON")
        return super().fetch(mode, filename, value, read)


def write_frozen(path: Path, entries: Mapping[str, Entry]) -> None:
    """JSONL sorted by key: equal entries give equal bytes."""
    write_jsonl(path, ({"key": key, **entries[key].to_row()} for key in sorted(entries)))


def read_frozen(path: Path) -> dict[str, Entry]:
    """The entries by key; ValueError names an invalid line."""
    if not path.is_file():
        raise ValueError(
            f"environment.cache.frozen = {str(path)!r} is not a file, so there are no answers to replay. Fetch it with "
            f"`dvc pull`, write it with `python -m tasks cache freeze {path}`, or correct the path."
        )
    entries: dict[str, Entry] = {}
    for number, row in read_jsonl(path):
        key, entry = _entry_on(row, f"{path}, line {number}")
        if key in entries:
            raise _refused(f"{path}, line {number}", f"the key {key[:12]}… was given before")
        entries[key] = entry
    return entries


def _entry_on(row: dict[str, Any], where: str) -> tuple[str, Entry]:
    key = row.pop("key", None)
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise _refused(where, "`key` is not a SHA-256")
    try:
        return key, Entry.model_validate(row)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise _refused(where, f"{place}: {fault['msg']}" if place else fault["msg"]) from None


def _refused(where: str, why: str) -> ValueError:
    return ValueError(
        f"{where}: not an entry of the tool cache ({why}), so the file cannot be trusted. Restore it with "
        f"`dvc checkout`, or write it again with `python -m tasks cache freeze`."
    )


def cache_key(*parts: Any) -> str:
    """Unlike `json_hash`, accepts NaN and half a surrogate pair, which a model may write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
