"""The files that turnwise writes and reads again: content, consequence of a loss, and repair command. A disk, a kill or
an editor may damage any of them; `core/files.py` then reports one line with the command.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

# In a stage's folder: its models, and other files that are read.
MODELS = (("assess", "base_model"), ("warm_start", "model"), ("train", "snapshots/*"))
OF_DVC = ("dvc.lock", "dvc.yaml")
OTHERS = {
    "curate": ("train.jsonl", "select.jsonl", "test.jsonl", "demonstrations.jsonl"),
    "assess": ("trajectories.jsonl",),
    "warm_start": ("metrics.jsonl",),
    "evaluate": ("trajectories/*.jsonl",),
}


@dataclass(frozen=True, slots=True)
class KeptFile:
    """`pattern`: a path in the artifacts folder, or in the project's for a file of DVC. `holds` and `loss` complete the
    sentences of `damaged`; `way_back`: path → command. `shape`: a name in `file_shapes.py`.
    """

    pattern: str
    holds: str
    loss: str
    way_back: Callable[[Path], str]
    shape: str | None = None


def _removed(path: Path) -> str:
    return f"rm {shlex.quote(str(path))}"


def _then(command: str) -> Callable[[Path], str]:
    return lambda path: f"{_removed(path)} && {command}"


def _without_its_run(path: Path) -> str:
    run = next(parent for parent in path.parents if parent.parent.name == "ablation")
    return f"rm -r {shlex.quote(str(run))} && python -m tasks ablate"


def _from_git(path: Path) -> str:
    return f"git checkout {shlex.quote(str(path))}"


def _from_git_or_removed(path: Path) -> str:
    return f"{_from_git(path)} || {_removed(path)}"


def _of_stage(stage: str, name: str, shape: str | None = None) -> KeptFile:
    return KeptFile(f"{stage}/{name}", f"what the stage {stage} left", AGAIN, lambda path: f"dvc repro {stage}", shape)


AGAIN = "nothing is lost: DVC has a copy, or the stage makes it again"
SECONDS = "the report lacks these seconds"
LOOKS = "evaluations since the last promotion are not counted as uses of the test problems"
ACCEPTED, ACCEPT_AGAIN = "which changes of the environment were accepted", "accept them again, with --accept-drift"
WAITING = "a pending approval is lost; the registry and its aliases are stored elsewhere"
LOCK = "nothing is lost if it is committed; else stages that are not in DVC's run cache run again"
GRAPH = "your own changes to it since the last commit are lost"
REPORT, PROMOTE = _then("python -m tasks report"), _then("python -m tasks promote")
IN_A_RUN = ("*.json", "*.jsonl", "train/*.json", "train/*.jsonl", "train/snapshots/*/*.json")
# The first match counts.
KEPT = (
    KeptFile("accepted_drift.json", ACCEPTED, ACCEPT_AGAIN, _removed, "AcceptedDrifts"),
    KeptFile("promote/decision.json", "the last decision about a champion", WAITING, PROMOTE, "Decision"),
    KeptFile("evaluations.jsonl", "which evaluations on test were made", LOOKS, _removed),
    KeptFile("timings/evaluate.json", "how long the episodes of evaluate took", SECONDS, REPORT, "Timings"),
    KeptFile("timings/idle.json", "how long trainer and engines were idle", SECONDS, REPORT, "Idle"),
    KeptFile("run.json", "how long the stages of the last flow took", SECONDS, REPORT, "FlowRecord"),
    KeptFile("dvc.lock", "which inputs each stage's results were made from", LOCK, _from_git_or_removed, "Lock"),
    KeptFile("dvc.yaml", "the graph of the stages", GRAPH, _from_git),
    *(KeptFile(f"ablation/*/{n}", "one run of the ablation", "it trains again", _without_its_run) for n in IN_A_RUN),
    KeptFile("provenance/*.json", "what a stage ran with", AGAIN, lambda path: f"dvc repro {path.stem}", "Provenance"),
    _of_stage("curate", "card.json", "Card"),
    _of_stage("curate", "environment.json", "Pin"),
    _of_stage("assess", "baseline.json", "Baseline"),
    _of_stage("evaluate", "evaluation.json", "Evaluation"),
    _of_stage("train", "metrics.jsonl", "Iteration"),
    _of_stage("train", "learnt.json", "Learnt"),
    _of_stage("curate", "references.jsonl", "Replies"),
    *(_of_stage(stage, f"{model}/{n}.json", "Pointer") for stage, model in MODELS for n in ("pointer", "base")),
    *(_of_stage(stage, f"{model}/*") for stage, model in MODELS),
    *(_of_stage(stage, name) for stage, names in OTHERS.items() for name in names),
)


def kept_file(path: Path) -> KeptFile | None:
    """The entry of a file, if it is turnwise's own: a user's may have the same name elsewhere."""
    for kept in _of_that_name(path):
        here = Path.cwd()
        folder = here if kept.pattern in OF_DVC else _artifacts(here)
        if Path(os.path.abspath(path)).parents[kept.pattern.count("/")] == folder:
            return kept
    return None


@lru_cache
def _of_that_name(path: Path) -> tuple[KeptFile, ...]:
    return tuple(kept for kept in KEPT if path.match(kept.pattern))


def _artifacts(project: Path) -> Path | None:
    """The artifacts folder of params.yaml; None without that file."""
    from tasks.core.settings import PARAMS_FILE

    try:
        changed = (project / PARAMS_FILE).stat().st_mtime_ns
    except OSError:
        return None
    return _read_artifacts(project, changed)


@lru_cache
def _read_artifacts(project: Path, changed: int) -> Path | None:
    from tasks.core.settings import PARAMS_FILE, load_paths, read_params

    try:
        return Path(os.path.abspath(project / load_paths(read_params(project / PARAMS_FILE)).artifacts))
    except ValueError:
        return None


def damaged(path: Path, found: str, *, line: int | None = None) -> ValueError:
    """The error for a damaged file; `found` is what it, or the line, is instead."""
    where, kept = f"{path}, line {line}" if line else str(path), kept_file(path)
    if kept is None:
        return ValueError(
            f"{where}: {found}. {'Correct or remove it.' if line else 'Correct it, or restore the file.'}"
        )
    return ValueError(
        f"{where}: {found}, so the file is damaged. It contains {kept.holds}; without it {kept.loss}. Repair it with "
        f"`{kept.way_back(path)}`."
    )


def check_shape(path: Path, value: Any) -> None:
    """ValueError if `value`, read from the file, lacks what its readers require. Checks files of other runs too, for
    `compare`.
    """
    _check_shape(path, kept_file(path) or next(iter(_of_that_name(path)), None), value, line=None)


def row_check(path: Path) -> Callable[[Any, int], None]:
    """The same for each row of a file and its line number. Rows of other runs are not checked: they may be a user's
    problems in a file of that name.
    """
    kept = kept_file(path)
    return lambda row, line: _check_shape(path, kept, row, line=line)


def _check_shape(path: Path, kept: KeptFile | None, value: Any, *, line: int | None) -> None:
    if kept is None or kept.shape is None:
        return
    from pydantic import ValidationError

    try:
        _adapter(kept.shape).validate_python(value, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise damaged(path, f"not of the shape turnwise writes ({place}: {fault['msg']})", line=line) from None


@lru_cache
def _adapter(shape: str) -> Any:
    """Imported at the first file: `--help` and a Python without the packages read none."""
    from pydantic import TypeAdapter

    from tasks.core import file_shapes

    return TypeAdapter(getattr(file_shapes, shape))
