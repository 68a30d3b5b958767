"""The command `cache freeze`: the whole tool cache as one sorted JSONL file that DVC can version.

Recording fills a database, and two recordings of the same calls differ in bytes.
"""

from __future__ import annotations

from pathlib import Path

from tasks.commands.outputs import first_json, refuse_to_replace
from tasks.core.files import file_hash
from tasks.core.settings import Settings, load, read_params
from tasks.core.text import counted
from tasks.core.urls import is_url
from tasks.environments.settings import EnvironmentSettings
from tasks.storage.settings import PathsSettings
from tasks.tools.cache.store import KEY, Entry, ToolStore, read_frozen, write_frozen
from tasks.tools.settings import CacheSettings, check_is_custom

WHERE_NONE_IS_NAMED = "tool_cache.jsonl"  # in paths.custom


class FreezeSections(Settings):
    paths: PathsSettings
    environment: EnvironmentSettings


def freeze(path: Path | None) -> list[str]:
    """Write the cache to `path`, or where it was frozen before; returns the lines to print."""
    settings = load(FreezeSections, read_params())
    cache, folder = settings.environment.cache, Path(settings.paths.custom)
    named = None if cache.frozen is None or is_url(cache.frozen) else Path(cache.frozen)
    path = path or named or folder / WHERE_NONE_IS_NAMED
    check_is_custom(str(path), folder)
    refuse_to_replace(path, kind="a frozen cache", is_own=_is_frozen, remedy=f"Name a new file in {folder}.")
    entries = recorded(cache)
    if not entries:
        raise ValueError(
            f"{cache.folder}: contains no recorded replies, so there is nothing to freeze. Run with "
            f"environment.cache.mode: record first."
        )
    write_frozen(path, entries)
    counts = [
        f"{title} {sum(getattr(entry, kind) is not None for entry in entries.values()):,}"
        for kind, title in (("reply", "replies"), ("verdict", "verdicts"), ("environment", "environments"))
    ]
    return [
        f"{path}: {counted(len(entries), 'entry', 'entries')} ({', '.join(counts)})",
        f"  dvc add {path}  versions it",
        f"  environment.cache.frozen: s3://BUCKET/{path.name}#sha256={file_hash(path)}  names it once you put it on S3",
        f"  environment.cache.mode: strict and environment.cache.frozen: {path}  replay it with the tools switched off",
    ]


def _is_frozen(path: Path) -> bool:
    """By its first entry: one with a damaged line may be written again."""
    found = first_json(path)
    return isinstance(found, dict) and KEY.fullmatch(str(found.get("key"))) is not None


def recorded(cache: CacheSettings) -> dict[str, Entry]:
    entries = read_frozen(cache.frozen_file) if cache.frozen_file and cache.frozen_file.exists() else {}
    if Path(cache.folder).is_dir():
        store = ToolStore(Path(cache.folder))
        entries |= dict(store.entries())
        store.close()
    return entries
