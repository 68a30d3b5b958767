"""What a stage ran with, written beside its results: artifacts/provenance/<stage>.json.

Settings, code, data, git commit, packages and machine are read when the stage starts, so an edit made while it runs, or
between training and promotion, is not mistaken for what it ran with. The file is an out of its own in dvc.yaml on which
no stage depends: a repeat under another commit changes it and starts nothing else, and where DVC restores results from
its cache it restores the record of the run that made them. `outs` is the hash of the results that it describes; a
record that is left from another run does not fit them.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.core.files import content_hash, files_of, read_yaml, write_json
from tasks.core.resume import GRAPH, fill_in
from tasks.core.settings import PARAMS_FILE, Paths, read_params

LOCK_FILE = Path("dvc.lock")
RECORDED = ("curate", "assess", "warm_start", "train", "evaluate")  # the stages of dvc.yaml, in order
CODE = "tasks/"  # a dep under it is code, any other is data
ARTIFACTS = "artifacts"  # the folder of results in a record, whatever params.yaml calls it
ABSENT = "none"
CPU_INFO = Path("/proc/cpuinfo")


def provenance_file(stage: str, paths: Paths) -> Path:
    return paths.artifacts / "provenance" / f"{stage}.json"


def provenance(stage: str, sections: Mapping[str, Any], paths: Paths, *, num_threads: int) -> dict[str, Any]:
    """What a stage that starts now runs with. `sections` are the sections of params.yaml that it reads, as they are.

    It contains no time and no path of this machine, so equal runs have equal records. A dep that is missing has the
    hash ABSENT: the stage itself says best what it lacks.
    """
    commit, is_dirty = git_state(Path.cwd())
    return {
        "stage": stage,
        "settings": dict(sections),
        "git_commit": commit,
        "git_dirty": is_dirty,
        "dvc_lock_hash": hash_now(LOCK_FILE),
        "code": code_hashes(stage),
        "data": {name: hash_now(path) for name, path in _data_of(stage, paths).items()},
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_threads": num_threads,
    }


def write_provenance(record: Mapping[str, Any], paths: Paths) -> None:
    """The record of a stage that is done, bound to the results that are there now."""
    stage = str(record["stage"])
    write_json(provenance_file(stage, paths), {**record, "outs": content_hash(paths.stage(stage))})


def code_hashes(stage: str) -> dict[str, str]:
    """`hash_now` of each file of the stage's code, by path: those of the folders under tasks/ that dvc.yaml names for
    today's params.
    """
    params = read_params()
    deps = {Path(dep) for item in _deps(stage) if (dep := fill_in(item, params)).startswith(CODE)}
    files = {file for dep in deps for file in (files_of(dep) if dep.exists() else [dep])}
    return {file.as_posix(): hash_now(file) for file in sorted(files)}


def hash_now(path: Path) -> str:
    """`content_hash` of a file, or of all that is in a folder, as it is now; ABSENT where there is none."""
    return content_hash(path) if path.exists() else ABSENT


@cache  # reading 300 packages takes half a second, and a process does not change its own
def package_versions() -> dict[str, str]:
    """The version of every installed distribution, by its normalised name (PEP 503), sorted."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a half removed one has none; of two on the path Python imports the first
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return dict(sorted(found.items()))


def git_state(root: Path) -> tuple[str, str]:
    """(commit, "true"/"false" whether a file differs from it); ("none", "unknown") outside git.

    New files that git does not ignore count. dvc.lock, which every run rewrites, and the project's params.yaml do not:
    the settings are in the record, and a version keeps both files.
    """
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    kept = (":(exclude,top,glob)**/dvc.lock", f":(exclude){PARAMS_FILE}")
    changes = _git(root, "status", "--porcelain", "--", ".", *kept)
    if changes is None:
        return "none", "unknown"
    return (commit or "none"), str(bool(changes)).lower()


def git_branch(root: Path) -> str:
    """The branch that is checked out; "" outside git, and HEAD where none is."""
    return _git(root, "rev-parse", "--abbrev-ref", "HEAD") or ""


def cpu_model() -> str:
    """The processor's name, such as "AMD EPYC 7B13"; its architecture where the machine does not say."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _data_of(stage: str, paths: Paths) -> dict[str, Path]:
    """The stage's deps that are no code: what each is called in a record, and where it is."""
    params = read_params()
    here = {**params, "paths": {"artifacts": str(paths.artifacts)}}
    named = {**params, "paths": {"artifacts": ARTIFACTS}}
    found = {fill_in(dep, named): Path(fill_in(dep, here)) for dep in _deps(stage)}
    return {name: path for name, path in sorted(found.items()) if not name.startswith(CODE)}


def _deps(stage: str) -> list[str]:
    return list(read_yaml(GRAPH)["stages"][stage]["deps"])


def _git(root: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # looking must not block a commit
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Origin:
    """params.yaml and dvc.lock (None where there is none) as all stages ran with them, and each stage's record."""

    params: dict[str, Any]
    params_text: str
    lock: bytes | None
    lock_hash: str
    records: dict[str, dict[str, Any]]
