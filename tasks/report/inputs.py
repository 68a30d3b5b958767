"""Whether what an earlier stage left is what this evaluation read: a stage that ran again since then tells of others.

The records of the stages say it. Weights may be many GB, so results are hashed only where they are newer than their
record: a run may have been killed between the two, and `dvc checkout` writes them in any order.
"""

from __future__ import annotations

from pathlib import Path

from tasks.core.files import content_hash, files_of, read_json
from tasks.core.provenance import ARTIFACTS, provenance_file
from tasks.core.settings import Paths

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
        expected, folder = read.get(f"{ARTIFACTS}/{stage}"), paths.stage(stage)
        if expected is not None and folder.exists() and expected != _hash_of(folder, provenance_file(stage, paths)):
            found[stage] = (
                f"{folder} is not what this evaluation read, so {what} left out. To measure what is there now, run "
                f"`python -m tasks evaluate`."
            )
    return found


def _hash_of(folder: Path, record: Path) -> str:
    if record.exists():
        written = record.stat().st_mtime_ns
        if all(file.stat().st_mtime_ns <= written for file in files_of(folder)):
            return str(read_json(record)["outs"])
    return content_hash(folder)
