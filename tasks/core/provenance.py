"""What a stage ran with, written beside its results: artifacts/provenance/<stage>.json.

Settings, code, data, commit, packages and machine are read when the stage starts, so later edits are not recorded. The
file is its own out in dvc.yaml on which no stage depends: a repeat under another commit reruns nothing else, and DVC
restores it with the results. `outs` is the hash of the results, so a record of another run does not fit.
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

from tasks.core.files import content_hash, files_of, is_page_of_code, read_yaml, write_json
from tasks.core.resume import GRAPH, fill_in, with_artifacts
from tasks.core.settings import PARAMS_FILE, Paths, read_params
from tasks.core.urls import local_path
from tasks.core.workspace import folder_of_code

LOCK_FILE = Path("dvc.lock")
RECORDED = ("curate", "assess", "warm_start", "train", "evaluate")  # the stages of dvc.yaml, in order
CODE = "tasks/"  # a dep under it is code, any other is data
ARTIFACTS = "artifacts"  # the name in records, whatever params.yaml calls the folder
ABSENT = "none"
CPU_INFO = Path("/proc/cpuinfo")
STATED = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)  # of the headers of a package's metadata


def provenance_file(stage: str, paths: Paths) -> Path:
    return paths.artifacts / "provenance" / f"{stage}.json"


def provenance(
    stage: str, sections: Mapping[str, Any], paths: Paths, *, num_threads: int, device: str
) -> dict[str, Any]:
    """What a stage that starts now runs with. `sections`: the sections of params.yaml that it reads. Without times and
    paths, so equal runs have equal records. A missing dep has the hash ABSENT; the stage itself reports it.
    """
    commit, is_dirty = git_state(folder_of_code())
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
        "device": device,
    }


def write_provenance(record: Mapping[str, Any], paths: Paths) -> None:
    stage = str(record["stage"])
    write_json(provenance_file(stage, paths), {**record, "outs": content_hash(paths.stage(stage))})


def code_hashes(stage: str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Path → hash of each file, READMEs aside, in the folders of code that dvc.yaml names for this stage and params
    (None: those of params.yaml).
    """
    params = read_params() if params is None else dict(params)
    deps = {Path(dep) for item in _deps(stage) if (dep := fill_in(item, params)).startswith(CODE)}
    files = {file for dep in deps for file in (files_of(dep) if dep.exists() else [dep])}
    return {file.as_posix(): hash_now(file) for file in sorted(files) if not is_page_of_code(file)}


def hash_now(path: Path) -> str:
    return content_hash(path) if path.exists() else ABSENT


@cache  # reading 350 packages takes 0.02 s; with their descriptions, as `distribution.metadata` does, 0.1 to 0.2 s
def package_versions() -> dict[str, str]:
    """Normalised name (PEP 503) → version of every installed distribution, sorted."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
        stated = dict(STATED.findall((text or distribution.read_text("") or "").partition("\n\n")[0]))
        if name := stated.get("Name"):  # a half-removed one has none; Python imports the first of two
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), stated.get("Version", ABSENT))
    return dict(sorted(found.items()))


def git_state(root: Path) -> tuple[str, str]:
    """(commit, "true"/"false" whether any file differs from it); ("none", "unknown") outside git.

    New files count, unless git ignores them. dvc.lock, which every run rewrites, and params.yaml, which is in the
    record, do not.
    """
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    kept = (":(exclude,top,glob)**/dvc.lock", f":(exclude){PARAMS_FILE}")
    changes = _git(root, "status", "--porcelain", "--", ".", *kept)
    if changes is None:
        return "none", "unknown"
    return (commit or "none"), str(bool(changes)).lower()


def git_branch(root: Path) -> str:
    """The current branch; "" outside git, HEAD if detached."""
    return _git(root, "rev-parse", "--abbrev-ref", "HEAD") or ""


def cpu_model() -> str:
    """The processor's name, such as "AMD EPYC 7B13", or its architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _data_of(stage: str, paths: Paths) -> dict[str, Path]:
    """Name in a record → path of the stage's deps that are not code."""
    params = read_params()
    here, named = (with_artifacts(params, folder) for folder in (str(paths.artifacts), ARTIFACTS))
    found = {fill_in(dep, named): local_path(fill_in(dep, here)) for dep in _deps(stage)}
    return {name: path for name, path in sorted(found.items()) if not name.startswith(CODE)}


def _deps(stage: str) -> list[str]:
    return list(read_yaml(GRAPH)["stages"][stage]["deps"])


def _git(root: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # must not block a commit
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
    """params.yaml and dvc.lock (or None) of all stages, and each stage's record."""

    params: dict[str, Any]
    params_text: str
    lock: bytes | None
    lock_hash: str
    records: dict[str, dict[str, Any]]
