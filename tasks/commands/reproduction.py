"""The commands that make a registered version again in a clean clone, and why the weights might differ.

They name this registry, since the clone's params.yaml may name another, and copy what training read and git does not
contain. They never contain a password: the settings refuse a URL with one, and MLflow's own variables provide it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.provenance import ARTIFACTS, CODE, cpu_model, hash_now, package_versions
from tasks.core.text import first_few
from tasks.core.urls import is_url
from tasks.core.workspace import LINKED, folder_of_code
from tasks.drift.pin import ACCEPT_VARIABLE
from tasks.tracking.connection import absolute_uri
from tasks.tracking.settings import TrackingSettings, model_uri

LAST_STAGE = "train"  # it makes the weights
BEFORE = ("curate", "assess", "warm_start", LAST_STAGE)
PASSWORD_VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD")
MAX_NAMED = 4  # packages in a note

Records = Mapping[str, Mapping[str, Any]]  # by stage, as `provenance.py` writes them


def reproduction(row: Mapping[str, Any], lineage_folder: str, tracking: TrackingSettings) -> dict[str, list[str]]:
    """`commands` for a shell in this project's folder, one per line, and `notes`; `row` is what `lineage` gathered."""
    commit, records = row["code"]["git_commit"], row["provenance"] or {}
    uri = model_uri(row["model"], f"/{row['version']}")
    copy = f"models/{row['model']}-{row['version']}"  # git ignores that folder, so the clone stays clean
    commands, repository = [], ask_git("rev-parse", "--show-toplevel", folder=folder_of_code())
    is_recorded = commit not in (None, "none")
    if is_recorded and repository:
        clone = f"../{row['model']}-{row['version']}"
        commands += [
            _shell("git", "clone", "--quiet", repository, clone),
            _shell("cd", str(Path(clone, _prefix()))),
        ]
    if row["params"] is not None:
        commands.append(_shell("python", "-m", "tasks", "fetch", uri, copy, "--registry", absolute_uri(tracking)))
    if is_recorded:
        commands.append(_shell("git", "checkout", "--quiet", commit))
    if row["params"] is not None:
        commands.append(_shell("cp", f"{copy}/{lineage_folder}/params.yaml", "params.yaml"))
    inputs = inputs_outside_git(commit, records) if is_recorded else []
    commands += [_put_there(name, records) for name in inputs]
    commands.append(f"{_accept_prefix(row)}dvc repro {LAST_STAGE}")
    return {"commands": commands, "notes": _notes(row, uri, records, inputs)}


def inputs_outside_git(commit: str, records: Records) -> list[str]:
    """What the stages up to training read in the project's folder that is neither a stage's result nor in the commit:
    data, a model. What is outside stays where it is.
    """
    names = sorted({name for stage in BEFORE for name in records.get(stage, {}).get("data", {})})
    return [
        name
        for name in names
        if not (name.startswith(f"{ARTIFACTS}/") or _is_outside(name) or is_url(name))
        and not _is_in_commit(commit, name)
    ]


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def recorded_hash(name: str, records: Records) -> str:
    """Of an input, as the first stage that read it found it."""
    return next(str(records[stage]["data"][name]) for stage in BEFORE if name in records.get(stage, {}).get("data", {}))


def is_as_recorded(name: str, records: Records) -> bool:
    return hash_now(Path(name)) == recorded_hash(name, records)


def _put_there(name: str, records: Records) -> str:
    if not is_as_recorded(name, records):
        return f"# put {name} there, with the hash {recorded_hash(name, records)}: this project has another or none"
    place = shlex.quote(str(Path(name).parent))
    return f"mkdir -p {place} && {_shell('cp', '-R', str(Path(name).absolute()), name)}"


def uncommitted_code(commit: str, records: Records) -> list[str]:
    """Files of code that a stage ran with and the commit lacks, or has otherwise as far as this folder's files show."""
    ran = {name: digest for stage in BEFORE for name, digest in records.get(stage, {}).get("code", {}).items()}
    at = ("-z", "--name-only", commit, "--", CODE)
    in_commit = ask_git("ls-tree", "-r", *at, folder=folder_of_code())
    changed = ask_git("diff", "--relative", *at, folder=folder_of_code())
    if in_commit is None or changed is None:
        return []
    edited = [name for name in changed.split("\0") if name in ran and hash_now(Path(name)) == ran[name]]
    return sorted({*edited, *(ran.keys() - in_commit.split("\0"))})


def _is_in_commit(commit: str, name: str) -> bool:
    """A workspace has the code's files by links alone; another of its files may have the name of one of the code's."""
    code = folder_of_code()
    if code != Path.cwd() and Path(name).parts[0] not in LINKED:
        return False
    return ask_git("cat-file", "-e", f"{commit}:./{name}", folder=code) is not None


def has_commit(commit: str) -> bool:
    return ask_git("cat-file", "-e", f"{commit}^{{commit}}", folder=folder_of_code()) is not None


def repository_and_prefix() -> tuple[str, str]:
    """The repository around the code, which a workspace has links to, and the project's folder in it. ValueError
    outside of git.
    """
    repository = ask_git("rev-parse", "--show-toplevel", folder=folder_of_code())
    if not repository:
        raise ValueError(
            f"{folder_of_code()}: is not in a git repository, so there is no commit to make the version from. Run this "
            f"in a clone of the project."
        )
    return repository, _prefix()


def _notes(row: Mapping[str, Any], uri: str, records: Records, inputs: Sequence[str]) -> list[str]:
    commit, dirty, drift = row["code"]["git_commit"], row["code"]["git_dirty"], row["environment"]["environment_drift"]
    device = (records.get(LAST_STAGE) or {}).get("device") or "cpu"  # of older versions nothing is recorded
    promise = (
        "Bitwise the same weights on the same machine with the same packages and number of threads."
        if device.startswith("cpu")
        else f"Trained on {device}: there the same seeds and draws give weights that differ by rounding."
    )
    lost = [name for name in inputs if not is_as_recorded(name, records)]
    if lost:
        promise = (
            f"Other weights, until {', '.join(lost)} is what training read: git does not have it, and it changed here "
            f"or is gone. Restore it from a backup."
        )
    notes = [
        f"{promise} `python -m tasks lineage {shlex.quote(uri)} --verify DIR` runs these commands and compares.",
        *_describe_differences(records.get(LAST_STAGE)),
    ]
    if row["params"] is None:
        notes.append("This version has no copy of its params; the commit's params.yaml may differ.")
    if commit in (None, "none"):
        notes.append("No commit is recorded, so its code is not known.")
    elif not has_commit(commit):
        notes.append(f"Commit {commit[:12]} is not in this repository: fetch it, or clone a repository that has it.")
    if commit not in (None, "none") and dirty != "false":
        known = "was changed" if dirty == "true" else "may have been changed"
        notes.append(
            f"The working tree {known} after commit {commit[:12]} and nobody has a copy of the change: the commands "
            f"build from the commit alone. (params.yaml and dvc.lock are stored with the version and do not count.)"
        )
    if commit not in (None, "none") and (uncommitted := uncommitted_code(commit, records)):
        notes.append(f"It ran code that commit {commit[:12]} does not have so: {first_few(uncommitted, MAX_NAMED)}.")
    if _accept_prefix(row):
        notes.append(f"The environment changed during the run, and that was accepted: {drift}.")
    if any(os.environ.get(name) for name in PASSWORD_VARIABLES):
        notes.append("The registry needs a password: export MLflow's variables for it before `fetch`.")
    return notes


def _describe_differences(record: Mapping[str, Any] | None) -> list[str]:
    if record is None:
        return []
    here = package_versions()
    packages = [
        f"{name} {record['packages'].get(name, 'none')} → {here.get(name, 'none')}"
        for name in sorted({*record["packages"], *here})
        if record["packages"].get(name) != here.get(name)
    ]
    processors = [f"{record['cpu']} → {cpu_model()}"] if record["cpu"] != cpu_model() else []
    differing = [*processors, *([first_few(packages, MAX_NAMED)] if packages else [])]
    return [f"Different on this machine than at training: {', '.join(differing)}."] if differing else []


def _accept_prefix(row: Mapping[str, Any]) -> str:
    return "" if row["environment"]["environment_drift"] in (None, "none") else f"{ACCEPT_VARIABLE}=1 "


def _shell(*words: str) -> str:
    return shlex.join(words)


def _prefix() -> str:
    return ask_git("rev-parse", "--show-prefix", folder=folder_of_code()) or ""


def ask_git(*arguments: str, folder: Path | None = None) -> str | None:
    """git's output in a folder, the current one if not stated; None where it fails, or is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, timeout=30, check=False,
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
