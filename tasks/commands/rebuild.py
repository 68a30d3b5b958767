"""The command `lineage --verify DIR`: make a registered version again in DIR, and compare it hash by hash.

DIR becomes a clone of this repository at the training's commit, with the version's params.yaml, in which `dvc repro
train` runs. An interrupted call continues there. The evaluation is not compared, since it made no weights. Other
packages or another processor are printed but do not count: the same weights on another machine are the better proof.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.commands.lineage import describe
from tasks.commands.reproduction import (
    BEFORE,
    LAST_STAGE,
    has_commit,
    inputs_outside_git,
    is_as_recorded,
    recorded_hash,
    repository_and_prefix,
)
from tasks.core.files import atomic_folder, json_hash, link_or_copy, read_json, write_json
from tasks.core.provenance import provenance_file
from tasks.core.settings import PARAMS_FILE, Paths, load_paths, read_params
from tasks.core.terminal import tell
from tasks.core.text import one_line, printable
from tasks.drift.pin import ACCEPT_VARIABLE
from tasks.pipeline.order import prepare_process
from tasks.pipeline.run_lock import FLOW_VARIABLE
from tasks.tracking.metrics import RUN_ID_VARIABLE, URI_VARIABLE
from tasks.tracking.model_uri import find_version, refuse_edited_version

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

MARK = Path(".git") / "turnwise-rebuild.json"  # in a rebuild: of which version; git ignores it there
NOT_FOR_CHILDREN = (FLOW_VARIABLE, RUN_ID_VARIABLE, URI_VARIABLE, "DVC_SITE_CACHE_DIR")


class Compared(NamedTuple):
    part: str
    registered: str | None
    rebuilt: str | None

    @property
    def is_same(self) -> bool:
        return self.registered == self.rebuilt


def verify(uri: str, folder: Path, address: str | None, console: SafeConsole) -> bool:
    """Rebuild in `folder` and print the comparison; returns whether all is the same. `address`: the registry, if not
    params.yaml's.
    """
    registry, version = find_version(uri, address)
    refuse_edited_version(registry, version)  # its params name programs, which the stages start
    row = describe(registry, version)
    commit, records = row["code"]["git_commit"], row["provenance"]
    if not records or row["params"] is None or commit in (None, "none"):
        raise ValueError(
            f"{uri}: what it was trained with is not recorded (missing: {', '.join(row['missing']) or 'its commit'}), "
            f"so it cannot be made again and compared. `python -m tasks lineage {uri}` prints what is known."
        )
    project = _prepare(folder, row, _params_text(registry, version))
    tell(f"lineage: rebuilding {row['model']} version {row['version']} in {project}; when interrupted, run this again")
    _rebuild(project, row)
    with chdir(project):  # stages record models by paths relative to it
        compared = list(compare(row, version))
    _print(compared, row, project, console)
    return all(item.is_same for item in compared)


def _params_text(registry: Registry, version: Version) -> str:
    content = registry.read_lineage(version, PARAMS_FILE.name, Path.read_bytes)
    assert content is not None, "describe() has read it"
    return content.decode()


def _prepare(folder: Path, row: Mapping[str, Any], params_text: str) -> Path:
    """The project folder of the rebuild, created where `folder` is empty or absent. ValueError for any other."""
    repository, prefix = repository_and_prefix()
    commit, name = row["code"]["git_commit"], f"{row['model']} version {row['version']}"
    mark = {"version": name, "weights": row["weights"], "commit": commit, "params": json_hash(params_text)}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / MARK).is_file() or read_json(folder / MARK) != mark:
            raise ValueError(
                f"{folder}: is not empty and no rebuild of {name}, and --verify overwrites nothing. Name another "
                f"folder, or an empty one."
            )
        return folder / prefix
    if not has_commit(commit):
        raise ValueError(
            f"{name}: was trained at commit {commit[:12]}, which is not in {repository}, so it cannot be made again. "
            f"Run `git fetch --all` there, or this command in a clone that has the commit."
        )
    with atomic_folder(folder.absolute()) as temporary:
        _git("clone", "--quiet", "--no-checkout", repository, str(temporary))
        _git("-C", str(temporary), "checkout", "--quiet", "--detach", commit)
        _copy_inputs(commit, row["provenance"], temporary / prefix)
        (temporary / prefix / PARAMS_FILE).write_text(params_text, encoding="utf-8")
        write_json(temporary / MARK, mark)
    return folder / prefix


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = one_line(done.stderr)
        raise ValueError(
            f"git {arguments[0]} failed ({reason}), so the version's commit is not available. Nothing was written; "
            f"correct that, then run this again."
        )


def _copy_inputs(commit: str, records: Mapping[str, Mapping[str, Any]], project: Path) -> None:
    """Copy what the stages read and git does not contain, where this project's copy is still the same."""
    for name in inputs_outside_git(commit, records):
        if not is_as_recorded(name, records):
            raise ValueError(
                f"{name}: is not in git, and this project has no copy with the hash that training read "
                f"({recorded_hash(name, records)[:12]}), so the version cannot be made again. Restore that file, then "
                f"run this again."
            )
        target = project / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(name).is_dir():
            shutil.copytree(name, target, copy_function=link_or_copy)
        else:
            shutil.copyfile(name, target)


def _rebuild(project: Path, row: Mapping[str, Any]) -> None:
    """Run every unfinished stage up to training; their output goes to this terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    if row["environment"]["environment_drift"] not in (None, "none"):
        environment[ACCEPT_VARIABLE] = "1"
    command = [sys.executable, "-m", "dvc", "repro", LAST_STAGE]
    status = subprocess.run(command, cwd=project, env=environment, check=False).returncode
    if status != 0:
        raise ValueError(
            f"{project}: the rebuild stopped in `dvc repro {LAST_STAGE}`, whose own message is above, so nothing "
            f"was compared. Correct that there, then run this again: finished stages are not repeated."
        )


def compare(row: Mapping[str, Any], version: Version) -> Iterator[Compared]:
    from tasks.models.folders import folder_hash, weights_hash

    params = read_params()
    paths = load_paths(params)
    rebuilt = {stage: read_json(provenance_file(stage, paths)) for stage in BEFORE}
    for stage, record in rebuilt.items():
        before = row["provenance"][stage]
        for part in ("settings", "code", "data"):
            yield Compared(f"{stage}: {part}", json_hash(before[part]), json_hash(record[part]))
        yield Compared(f"{stage}: results", before["outs"], record["outs"])
    card = read_json(paths.stage("curate") / "card.json")
    for name in sorted({*row["data"], *card["hashes"]}):
        yield Compared(name, row["data"].get(name), card["hashes"].get(name))
    model = _model(paths, row["snapshot"], params)
    yield Compared("weights", version.weights, weights_hash(model) if model else None)
    yield Compared("all files of the model", version.identity, folder_hash(model) if model else None)


def _model(paths: Paths, snapshot: str, params: dict[str, Any]) -> Path | None:
    from tasks.models.folders import merged_snapshot
    from tasks.models.settings import ComputeSettings
    from tasks.stages.promote.challenger import merged_folder

    folder = paths.stage("train") / "snapshots" / snapshot
    if not folder.exists():
        return None
    prepare_process(params)
    return merged_snapshot(folder, merged_folder(paths), compute=ComputeSettings(**params["compute"]))


def _print(compared: list[Compared], row: Mapping[str, Any], project: Path, console: SafeConsole) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in ("Part", f"version {row['version']}", "rebuilt", ""):
        table.add_column(column, no_wrap=True)
    for item in compared:
        told = Text("same", "green") if item.is_same else Text("differs", "bold red")
        table.add_row(item.part, *((value or "none")[:12] for value in (item.registered, item.rebuilt)), told)
    console.print(table)
    for note in row["reproduce"]["notes"][1:]:
        console.print(Text(printable(f"  {note}")), soft_wrap=True)
    num_differing = sum(not item.is_same for item in compared)
    result = f"{num_differing} of {len(compared)} parts differ" if num_differing else "everything is the same"
    console.print(Text(f"{row['model']} version {row['version']}, made again in {project}: {result}"), soft_wrap=True)
