"""Whether what an earlier stage left is what this evaluation read: a stage that ran again since then tells of others.

The records of the stages say it. Results that are newer than their record may be of a run that was killed before it
wrote one, so they are hashed, unless they are large: `dvc checkout` too writes files and records in any order.
"""

from __future__ import annotations

from pathlib import Path

from tasks.core.files import content_hash, files_of, read_json
from tasks.core.provenance import ABSENT, ARTIFACTS, provenance_file
from tasks.core.settings import Paths

MAX_HASHED = 1 << 28  # bytes
LEFT_OUT = {
    "assess": "the baseline is",
    "warm_start": "the attempts of the warm start are",
    "train": "the curves of training are",
}  # of what the report shows beside the evaluation


def find_others(paths: Paths) -> dict[str, str]:
    """A sentence for each stage whose results are not those that this evaluation read; a stage without a record of it
    is taken for the one.
    """
    file = provenance_file("evaluate", paths)
    read = read_json(file)["data"] if file.exists() else {}
    found = {}
    for stage, what in LEFT_OUT.items():
        folder = paths.stage(stage)
        now = _hash_of(folder, provenance_file(stage, paths)) if folder.exists() else ABSENT
        if read.get(f"{ARTIFACTS}/{stage}", now) != now:
            found[stage] = (
                f"{folder} is not what this evaluation read, so {what} left out. To measure what is there now, run "
                f"`python -m tasks evaluate`."
                if folder.exists()
                else f"{folder} is gone or being made again, so {what} left out."
            )
    return found


def _hash_of(folder: Path, record: Path) -> str:
    if not record.exists():
        return content_hash(folder)
    files, written = [file.stat() for file in files_of(folder)], record.stat().st_mtime_ns
    is_newer = any(file.st_mtime_ns > written for file in files)
    if is_newer and sum(file.st_size for file in files) <= MAX_HASHED:
        return content_hash(folder)
    return str(read_json(record)["outs"])
