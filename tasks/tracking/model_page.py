"""MLflow's page of a logged model, filled from its version's lineage files: params, results by split, run, and
what its chat template is called with. Idempotent. Metrics need a run, so a promotion by hand has none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, read_yaml
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import PARAMS_FILE
from tasks.models.settings import TemplateSettings
from tasks.tracking.datasets import Dataset, locked_datasets
from tasks.tracking.metrics import flatten, metric_name
from tasks.tracking.stage_results import headline_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

KWARGS_TAG = "chat_template_kwargs"


def describe_model(
    client: MlflowClient, model: Any, lineage: Path, *, run_id: str | None, tags: Mapping[str, str]
) -> None:
    """Fill the page of a logged model from its version's `lineage` folder and tags; the run `run_id` made it."""
    client.set_logged_model_tags(model.model_id, {**tags, **_template_tags(lineage)})
    if not model.params and (lineage / PARAMS_FILE).exists():
        params = flatten(read_yaml(lineage / PARAMS_FILE))
        client.log_model_params(model.model_id, {metric_name(name): str(value) for name, value in params})
    if run_id is None:
        return
    run = client.get_run(run_id)
    if run.info.lifecycle_stage != "active" or model.model_id in {made.model_id for made in run.outputs.model_outputs}:
        return
    _log_results(client, model.model_id, lineage, run_id)
    _log_output(client, model.model_id, run_id)


def _template_tags(lineage: Path) -> dict[str, str]:
    """What a server must call the chat template with, so that the model sees the prompts it was trained on; empty where
    that is nothing. vLLM takes it as `chat_template_kwargs` of a request.
    """
    params = read_yaml(lineage / PARAMS_FILE) if (lineage / PARAMS_FILE).exists() else {}
    stated = params.get("model", {}).get("template")
    variables = TemplateSettings(**stated).variables if stated else {}
    return {KWARGS_TAG: json.dumps(variables, sort_keys=True)} if variables else {}


def link_version(client: MlflowClient, model: Any, version: Any) -> None:
    """As `mlflow.register_model` does."""
    named = json.dumps([{"name": version.name, "version": int(version.version)}])
    client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": named})


def _log_results(client: MlflowClient, model_id: str, lineage: Path, run_id: str) -> None:
    from mlflow.entities import Metric

    if not (lineage / "evaluation.json").exists():
        return
    splits = {split.name: split for split in locked_datasets("evaluate", lineage / LOCK_FILE)}
    now = int(time.time() * 1000)
    metrics = []
    for point in headline_of(read_json(lineage / "evaluation.json")):
        split: Dataset | None = splits.get(point.key.partition("/")[0])
        on = {"dataset_name": split.name, "dataset_digest": split.digest} if split else {}
        metrics.append(Metric(point.key, point.value, now, point.step, model_id=model_id, run_id=run_id, **on))
    client.log_batch(run_id, metrics=metrics)


def _log_output(client: MlflowClient, model_id: str, run_id: str) -> None:
    from mlflow.entities import LoggedModelOutput

    client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
