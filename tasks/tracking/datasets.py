"""The curated splits as MLflow datasets, so that a run shows its data and a model's metric its split.

The digest is the file's md5 in dvc.lock; where it has none, the same md5 computed from the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import dvc_md5, read_json
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import Paths
from tasks.tracking.lineage import lock_entry

if TYPE_CHECKING:
    from mlflow import MlflowClient

CONTEXTS = {"train": "training", "demonstrations": "training", "select": "selection", "test": "test"}
OUTSIDE_DVC = {"promote": ("test",)}  # promotion is no DVC stage, since it has a side effect


class Dataset(NamedTuple):
    name: str
    digest: str
    path: str


def datasets_of(stage: str, paths: Paths) -> list[Dataset]:
    files = (paths.split(name) for name in OUTSIDE_DVC.get(stage, ()))
    return locked_datasets(stage) + [Dataset(file.stem, dvc_md5(file), str(file)) for file in files if file.exists()]


def locked_datasets(stage: str, lock_file: Path = LOCK_FILE) -> list[Dataset]:
    deps = lock_entry(stage, lock_file).get("deps", [])
    paths = {Path(item["path"]): str(item["md5"]) for item in deps if "md5" in item}
    return [
        Dataset(path.stem, md5, str(path))
        for path, md5 in paths.items()
        if path.parent.name == "curate" and path.suffix == ".jsonl" and path.stem in CONTEXTS
    ]


def log_datasets(client: MlflowClient, run_id: str, datasets: Sequence[Dataset], paths: Paths) -> None:
    from mlflow.entities import Dataset as MlflowDataset
    from mlflow.entities import DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    sizes = _sizes(paths)
    inputs = [
        DatasetInput(
            MlflowDataset(
                item.name,
                item.digest,
                source_type="local",
                source=json.dumps({"uri": item.path}),
                profile=json.dumps({"num_problems": sizes[item.name]}) if item.name in sizes else None,
            ),
            tags=[InputTag(MLFLOW_DATASET_CONTEXT, CONTEXTS[item.name])],
        )
        for item in datasets
    ]
    if inputs:
        client.log_inputs(run_id, inputs)


def _sizes(paths: Paths) -> Mapping[str, Any]:
    try:
        return dict(read_json(paths.stage("curate") / "card.json")["num_problems"])
    except (ValueError, KeyError, TypeError):
        return {}
