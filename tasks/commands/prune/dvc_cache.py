"""What DVC's cache has and nothing needs: the results of runs before the last ones.

DVC keeps a note of every execution of a stage. What an old note names as a result may go, and nothing else: who put
other files into the cache is not known, and a person's data may be nowhere else. Of these results stay what `dvc.lock`
names, here and on every branch, tag, experiment and stash; whatever `dvc add` ever followed; what the newest notes
name; and of the registered versions' lineages the curated data and what was read from outside. DVC's own `dvc gc` knows
commits, and a scheduled run makes none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tasks.commands.prune.dvc_files import followed_texts, lock_texts
from tasks.core.passing_faults import NOT_THERE, reading
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

    @property
    def results(self) -> set[str]:
        return _hashes(self.stage.get("outs"))


class OldResults(NamedTuple):
    """`hashes` of files and folders, some of which may not be in the cache any more."""

    notes: list[Note]
    hashes: set[str]


class DvcCache:
    """The local cache, at what `dvc cache dir` says."""

    def __init__(self, folder: Path):
        self.folder = folder
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

    def files(self, hashes: Iterable[str]) -> list[Path]:
        """Those that are in it."""
        return [file for file in map(self.file, sorted(hashes)) if file.exists()]

    def _entries(self, md5: str) -> list[dict[str, Any]]:
        file = self.file(md5)
        try:
            with reading(str(file), loss="nobody knows which files are needed, and none of the cache was removed"):
                content = file.read_bytes()
        except NOT_THERE:
            return []  # not in this cache
        try:
            return [entry for entry in json.loads(content) if "md5" in entry]
        except (ValueError, TypeError):
            return []  # damaged, for DVC too


def find_old_results(cache: DvcCache, keep: int, lineage_locks: Iterable[str]) -> OldResults:
    """Results beyond the newest `keep` executions of each stage, without those that are needed all the same. A note
    stays as long as one of its results is needed: without it nobody would know later that this was one.
    `lineage_locks` are the texts of versions' dvc.lock.
    """
    notes = cache.notes()
    old = old_notes(notes, keep)
    needed = needed_hashes([note for note in notes if note not in old], lineage_locks)
    made = cache.closure(md5 for note in old for md5 in note.results)
    return OldResults([note for note in old if not note.results & needed], made - cache.closure(needed))


def old_notes(notes: Iterable[Note], keep: int) -> list[Note]:
    """Those beyond the newest `keep` of each stage."""
    of_command: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        of_command[note.command].append(note)
    return [note for each in of_command.values() for note in each[keep:]]


def needed_hashes(kept_notes: Iterable[Note], lineage_locks: Iterable[str]) -> set[str]:
    """MD5 of every file and folder that must stay."""
    found: set[str] = set()
    for text in lock_texts():
        for stage in _mapping(_mapping(text).get("stages")).values():
            found |= hashes_of(stage)
    for text in followed_texts():
        found |= hashes_of(_mapping(text))
    for note in kept_notes:
        found |= hashes_of(note.stage)
    for text in lineage_locks:
        found |= _needed_of_lineage(_mapping(_mapping(text).get("stages")))
    return found


def _needed_of_lineage(stages: Mapping[str, Any]) -> set[str]:
    """Of one version's dvc.lock: the curated data, and whatever no stage made; results are made again from these."""
    made = set().union(*(_hashes(_mapping(stage).get("outs")) for stage in stages.values()))
    read = set().union(*(_hashes(_mapping(stage).get("deps")) for stage in stages.values()))
    return _hashes(_mapping(stages.get(DATA_STAGE)).get("outs")) | (read - made)


def hashes_of(stage: Mapping[str, Any]) -> set[str]:
    return _hashes(stage.get("outs")) | _hashes(stage.get("deps"))


def _hashes(parts: Any) -> set[str]:
    return {str(part["md5"]) for part in parts or () if isinstance(part, dict) and "md5" in part}


def _mapping(value: Any) -> dict[str, Any]:
    """Of YAML text, or of what was one; empty for anything else."""
    try:
        found = PLAIN.load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        found = None
    return found if isinstance(found, dict) else {}


def _newest(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
