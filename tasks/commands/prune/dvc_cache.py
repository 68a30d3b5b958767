"""What DVC's cache has and nothing needs: the results of runs before the last ones.

Needed are: what `dvc.lock` names, here and on every branch, tag and experiment; the files that `dvc add` follows; the
results of the newest executions of each stage, of which DVC keeps a note each; and of the registered versions'
lineages the curated data and what was read from outside, which `dvc add` may have replaced since. DVC's own `dvc gc`
knows commits, and a scheduled run makes none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tasks.commands.reproduction import ask_git
from tasks.core.provenance import LOCK_FILE
from tasks.core.yaml_text import PLAIN

FOLDER_MARK = ".dir"  # ends the hash of a folder, whose object is a list of its files
DATA_STAGE = "curate"


class Note(NamedTuple):
    """What DVC keeps of one execution of a stage: a file under runs/, shaped like a stage of dvc.lock."""

    file: Path
    stage: Mapping[str, Any]

    @property
    def command(self) -> str:
        return str(self.stage.get("cmd"))


class DvcCache:
    """The local cache, at what `dvc cache dir` says."""

    def __init__(self, folder: Path):
        self.objects, self.runs = folder / "files" / "md5", folder / "runs"

    def file(self, md5: str) -> Path:
        return self.objects / md5[:2] / md5[2:]

    def notes(self) -> list[Note]:
        """The newest first. What cannot be read is left out: DVC ignores it too."""
        files = [file for file in self.runs.glob("*/*/*") if file.is_file()]
        found = (Note(file, _mapping(file.read_text(encoding="utf-8", errors="replace"))) for file in _newest(files))
        return [note for note in found if note.stage]

    def closure(self, hashes: Iterable[str]) -> set[str]:
        """With the files of folders."""
        found: set[str] = set()
        for md5 in hashes:
            found.add(md5)
            if md5.endswith(FOLDER_MARK):
                found |= {str(entry["md5"]) for entry in self._entries(md5)}
        return found

    def weights(self, hashes: Iterable[str]) -> set[str]:
        """Of the folders among them, the weight files."""
        folders = (md5 for md5 in hashes if md5.endswith(FOLDER_MARK))
        entries = (entry for md5 in folders for entry in self._entries(md5))
        return {str(entry["md5"]) for entry in entries if str(entry.get("relpath")).endswith(".safetensors")}

    def all_files(self) -> Iterator[tuple[str, Path]]:
        for file in sorted(self.objects.glob("??/*")):
            yield file.parent.name + file.name, file

    def _entries(self, md5: str) -> list[dict[str, Any]]:
        try:
            return [entry for entry in json.loads(self.file(md5).read_bytes()) if "md5" in entry]
        except (OSError, ValueError, TypeError):
            return []  # not in this cache


def old_notes(notes: Iterable[Note], keep: int) -> list[Note]:
    """Those beyond the newest `keep` of each stage."""
    of_command: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        of_command[note.command].append(note)
    return [note for each in of_command.values() for note in each[keep:]]


def needed_hashes(kept_notes: Iterable[Note], lineage_locks: Iterable[str]) -> set[str]:
    """MD5 of every file and folder that must stay; `lineage_locks` are the texts of versions' dvc.lock."""
    found: set[str] = set()
    for text in _lock_texts():
        for stage in _mapping(_mapping(text).get("stages")).values():
            found |= hashes_of(stage)
    for text in _followed_files():
        found |= hashes_of(_mapping(text))
    for note in kept_notes:
        found |= hashes_of(note.stage)
    for text in lineage_locks:
        found |= _needed_of_lineage(_mapping(_mapping(text).get("stages")))
    return found


def _needed_of_lineage(stages: Mapping[str, Any]) -> set[str]:
    """Of one version's dvc.lock: the curated data, and whatever no stage made; results are made again from these."""
    made = set().union(*(hashes_of({"outs": _mapping(stage).get("outs")}) for stage in stages.values()))
    read = set().union(*(hashes_of({"deps": _mapping(stage).get("deps")}) for stage in stages.values()))
    return hashes_of({"outs": _mapping(stages.get(DATA_STAGE)).get("outs")}) | (read - made)


def hashes_of(stage: Mapping[str, Any]) -> set[str]:
    parts = [*(stage.get("outs") or ()), *(stage.get("deps") or ())]
    return {str(part["md5"]) for part in parts if isinstance(part, dict) and "md5" in part}


def _lock_texts() -> Iterator[str]:
    if LOCK_FILE.exists():
        yield LOCK_FILE.read_text(encoding="utf-8")
    for ref in (
        ask_git("for-each-ref", "--format=%(objectname)", "refs/heads", "refs/tags", "refs/exps") or ""
    ).split():
        yield ask_git("show", f"{ref}:./{LOCK_FILE}") or ""


def _followed_files() -> Iterator[str]:
    for file in Path().rglob("*.dvc"):
        if file.is_file() and ".venv" not in file.parts:
            yield file.read_text(encoding="utf-8")


def _mapping(value: Any) -> dict[str, Any]:
    """Of YAML text, or of what was one; empty for anything else."""
    try:
        found = PLAIN.load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        found = None
    return found if isinstance(found, dict) else {}


def _newest(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
