"""Finds stored trajectories by what people call them: a run's folder, a file, or a registered model version.

Files are read row by row: all of an evaluation may not fit in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.files import names_in, read_json
from tasks.core.settings import Paths
from tasks.report.results import POLICIES
from tasks.storage.inputs import copy_argument
from tasks.tracking.lineage import stage_params
from tasks.tracking.model_uri import SCHEME, fetch_test_trajectories

FETCHED = "fetched"  # under artifacts: trajectories of model versions, unpacked
BEST = "best"
SEED = re.compile("-?[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Source:
    """One policy's trajectories: `name` for files, `model_name` for people, `label` with where it is from; `split` and
    `seed` where known. `details` is the rest (JSON); `model` is a folder with the tokenizer.
    """

    name: str
    model_name: str
    label: str
    trajectories: Path
    split: str | None = None
    seed: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    model: Path | None = None


def find_sources(reference: str, paths: Paths) -> list[Source]:
    """Every policy behind `reference`; of a run, those measured on test. ValueError where there is none."""
    if reference.startswith(SCHEME):
        return [_version(reference, paths)]
    place = copy_argument(reference)
    if place.is_file():
        return [_of_file(place, paths)]
    folder = _trajectory_folder(place)
    names = names_in(folder, ".jsonl")
    names = [name for name in names if name.startswith("test_")] or names
    if not names:
        raise ValueError(
            f"{reference}: there are no trajectories. Name a run's artifacts folder, a .jsonl file of trajectories, "
            f"or a model version such as models:/NAME@champion."
        )
    return [_of_file(folder / name, paths) for name in names]


def find_policy(reference: str, paths: Paths) -> Source:
    sources = find_sources(reference, paths)
    chosen = sources if len(sources) == 1 else [source for source in sources if source.name == BEST]
    if not chosen:
        names = ", ".join(source.trajectories.name for source in sources)
        raise ValueError(f"{reference}: contains several policies and no test_{BEST}.jsonl. Name one file of: {names}.")
    return chosen[0]


def _trajectory_folder(place: Path) -> Path:
    for folder in (place / "evaluate" / "trajectories", place / "trajectories"):
        if folder.is_dir():
            return folder
    return place


def _of_file(file: Path, paths: Paths) -> Source:
    """The files beside it describe a run's policy; any other file is described by its name."""
    stem, run = file.name.removesuffix(".jsonl"), file.parent.parent
    split, _, policy = stem.partition("_")
    evaluation = run / "evaluation.json"
    if split not in ("test", "select") or not policy or not evaluation.exists():
        return Source(stem, stem, str(file), file)
    results = read_json(evaluation)
    is_ours = run.resolve() == paths.stage("evaluate").resolve()
    snapshot = results["best_snapshot"] if policy == BEST else policy if split == "select" else None
    weights = results.get("weights", {}).get(policy)
    name = _model_name(policy, snapshot, results)
    model = run.parent / "assess" / "base_model"
    return Source(
        name=policy,
        model_name=name,
        label=name if is_ours else f"{name} of {run}",
        trajectories=file,
        split=split,
        seed=stage_params("evaluate").get("seed") if is_ours else None,
        details={
            **({"snapshot": snapshot} if snapshot else {}),
            **({"weights_hash": weights} if weights else {}),
        },
        model=model if model.is_dir() and policy != "frontier" else None,
    )


def _model_name(policy: str, snapshot: str | None, results: dict[str, Any]) -> str:
    if policy == "frontier":
        return str(results.get("frontier", {}).get("model", policy))
    return snapshot or POLICIES.get(policy, policy.replace("_", " "))


def _version(uri: str, paths: Paths) -> Source:
    found = fetch_test_trajectories(uri, paths.artifacts / FETCHED)
    version, tags = found.version, found.version.tags
    seed = tags.get("seed", "")
    told = ("snapshot", "weights_hash", "git_commit")
    return Source(
        name=found.trajectories.stem,
        model_name=f"{version.model}/{version.version}",
        label=version.name,
        trajectories=found.trajectories,
        split="test",
        seed=int(seed) if SEED.fullmatch(seed) else None,
        details={
            "model": version.model,
            "version": version.version,
            **{name: tags[name] for name in told if name in tags},
        },
    )
