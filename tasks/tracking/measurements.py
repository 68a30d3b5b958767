"""Measurements beside the flow, each a run of its own in MLflow: the checks of a champion, and single snapshots.

What a later measurement reads is one tag of JSON, so that it is there on every machine; metrics and files are for
people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.tracking.connection import connect, experiment_id, mlflow_errors, paged
from tasks.tracking.finished_runs import MODEL_TAG
from tasks.tracking.metrics import log_points, numbers
from tasks.tracking.runs import origin_tags
from tasks.tracking.settings import TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from pydantic import TypeAdapter

CHAMPION_CHECK, SNAPSHOT = "champion_check", "evaluate_snapshot"  # kinds
ROW_TAG = "row"
PAGE = 1000  # runs of one answer

Row = dict[str, Any]


def log_measurement(settings: TrackingSettings, kind: str, name: str, row: Row, *, model: str) -> str:
    """Store a measurement as a finished run; its numbers are metrics. Returns the run's id."""
    with mlflow_errors(settings):
        client: MlflowClient = connect(settings)
        tags = {**origin_tags(), "mlflow.source.name": kind, "kind": kind, MODEL_TAG: model}
        run_id = str(client.create_run(experiment_id(client, settings), run_name=name, tags=tags).info.run_id)
        log_points(client, run_id, numbers(row, "", int(row.get("number", 0))))
        client.set_tag(run_id, ROW_TAG, json.dumps(row))
        client.set_terminated(run_id, "FINISHED")
    return run_id


def read_checks(settings: TrackingSettings, model: str) -> list[Row]:
    """The rows of all finished checks of a champion, each with its run's id; the oldest first. One whose
    tag was edited until it is none is left out.
    """
    if settings.is_missing:
        return []
    with mlflow_errors(settings):
        client = connect(settings)
        experiment = client.get_experiment_by_name(settings.experiment)
        if experiment is None:
            return []
        where = f"tags.kind = '{CHAMPION_CHECK}' and tags.{MODEL_TAG} = '{model}' and attributes.status = 'FINISHED'"
        here, oldest = [experiment.experiment_id], ["attributes.start_time ASC"]
        found = paged(
            lambda token: client.search_runs(here, where, max_results=PAGE, order_by=oldest, page_token=token)
        )
        return [{**row, "mlflow_run_id": run.info.run_id} for run in found if (row := _row(run.data.tags)) is not None]


def _row(tags: Mapping[str, str]) -> Row | None:
    try:
        _shape_of_check().validate_json(tags.get(ROW_TAG, ""))
    except ValueError:  # anybody can edit a tag
        return None
    return dict(json.loads(tags[ROW_TAG]))


@cache
def _shape_of_check() -> TypeAdapter[Any]:
    """What readers need of a row."""
    from pydantic import AwareDatetime, TypeAdapter

    from tasks.core.file_shapes import shape

    rate = shape(success_rate=float)
    return TypeAdapter(
        shape(
            at=AwareDatetime, champion=int, fell=bool, alpha=float, most_change=float, success_rate=float, promoted=rate
        )
    )
