"""MLflow runs from the files that stages leave: one parent run per flow, one child per stage.

Stages know nothing of MLflow; the flow passes their files to `FlowRuns`. A stage that DVC found in its cache gets a
child tagged `cached=true` with the `source_run_id` of the run that did the work, so every parent shows a whole pipeline
and no number is stored twice. Runs are matched by the hash of the stage's entry in dvc.lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.processes import is_noted_gone, this_process
from tasks.core.provenance import git_branch, git_state
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.core.workspace import folder_of_code
from tasks.rewards.settings import RewardSettings
from tasks.tracking.connection import connect, experiment_id, mlflow_errors, or_none
from tasks.tracking.datasets import datasets_of, log_datasets
from tasks.tracking.finished_runs import MODEL_TAG, keep_finished, reason_tags, record_finished
from tasks.tracking.journal import operator
from tasks.tracking.lineage import stage_lock_hash, stage_params
from tasks.tracking.metrics import (
    Point,
    flatten,
    log_points,
    log_table,
    metric_name,
    wait_for_restarts,
    wait_no_longer,
)
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.stage_results import headline, outcome_tags, read_results
from tasks.tracking.traces import log_traces
from tasks.tracking.versions import DECISION_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

FLOW = "retrain"
MAX_BATCH_PARAMS = 100  # MLflow's limits of one log_batch, and of a value
MAX_PARAM_LENGTH = 6000
PARENT_TAG = "mlflow.parentRunId"
FLOW_RUN_TAG = "prefect_run"  # its id
PROCESS_TAG = "process"  # which one a run is the work of


class FlowRuns:
    """The MLflow runs of one flow: `begin`, then `begin_stage`/`end_stage` in order, `log_traces`, `finish` or `fail`.
    The first call may take 3 s; the flow calls them from one background thread. `name`: the parent's, as Prefect's run
    has it.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        params: Mapping[str, Any],
        paths: Paths,
        *,
        name: str = FLOW,
        prefect_run: str | None = None,
    ):
        self.settings, self.params, self.paths = settings, params, paths
        self.name, self.prefect_run = name, prefect_run
        self.parent_id = ""
        self.open_stages: dict[str, str] = {}

    def begin(self) -> str:
        """Open the parent run with the whole of params.yaml; close runs that a killed flow of this folder left open."""
        with mlflow_errors(self.settings):
            self.client: MlflowClient = connect(self.settings)
            self.experiment_id = experiment_id(self.client, self.settings)
            _close_open_runs(self.client, self.experiment_id, self.settings)
            self.origin = origin_tags()
            self.parent_id = self._create(
                FLOW, {"kind": "flow", **self._model_tag(), **reason_tags(self.paths)}, run_name=self.name
            )
            self._log_params(self.parent_id, dict(flatten(self.params)))
            self.client.log_dict(self.parent_id, self.params, PARAMS_FILE.name)  # to run it again
            if self.settings.database is None:
                wait_for_restarts()
            return self.parent_id

    def begin_stage(self, stage: str) -> str:
        with mlflow_errors(self.settings):
            self.open_stages[stage] = self._create(stage, {"kind": "stage", "stage": stage, PARENT_TAG: self.parent_id})
            return self.open_stages[stage]

    def end_stage(self, stage: str, *, cached: bool, seconds: float) -> None:
        with mlflow_errors(self.settings):
            run_id, lock_hash = self.open_stages[stage], stage_lock_hash(stage)
            source = self._source_run(stage, lock_hash) if cached else None
            if source is None:  # these numbers are nowhere else in MLflow
                self._log_params(run_id, stage_params(stage))
                log_datasets(self.client, run_id, datasets_of(stage, self.paths), self.paths)
                results = read_results(stage, self.paths)
                self._log_metrics(run_id, self._missing(run_id, results.points))
                for file, rows in results.tables.items():
                    log_table(self.client, run_id, file, rows)
            self._log_metrics(run_id, [Point("seconds", seconds, 0)])
            self._log_metrics(self.parent_id, [Point(f"seconds/{stage}", seconds, 0)])
            tags = {"cached": str(cached).lower(), "dvc_lock_hash": lock_hash, "source_run_id": source or ""}
            self.client.log_batch(run_id, tags=_tags({name: value for name, value in tags.items() if value}))
            self.client.set_terminated(self.open_stages.pop(stage), "FINISHED")

    def log_traces(self) -> None:
        """A sample of the evaluation's episodes, unless an earlier flow with the same evaluation logged it."""
        rewards = self.params.get("reward")
        log_traces(
            self.client,
            self.paths,
            RewardSettings.model_validate(rewards) if rewards else None,
            experiment_id=self.experiment_id,
            run_id=self.parent_id,
            evaluation=stage_lock_hash("evaluate"),
            most=self.settings.num_traces,
        )

    def finish(self) -> None:
        with mlflow_errors(self.settings):
            self._log_metrics(self.parent_id, self._missing(self.parent_id, headline(self.paths)))
            self.client.log_batch(self.parent_id, tags=_tags(outcome_tags(self.paths)))
            files = [self.paths.artifacts / name for name in ("progress.png", "progress.svg", "summary.json")]
            decision = self.paths.stage("promote") / DECISION_FILE
            for file in (*files, decision, decision.with_suffix(".html")):
                if file.exists():
                    self.client.log_artifact(self.parent_id, str(file))
            finished = record_finished(self.client, self.parent_id, self.params.get("promote", {}), self.paths)
            self.client.set_terminated(self.parent_id, "FINISHED")
            keep_finished(finished, self.paths)

    def fail(self, status: str) -> None:
        wait_no_longer()
        with mlflow_errors(self.settings):
            for run_id in (*self.open_stages.values(), self.parent_id):
                self.client.set_terminated(run_id, status)

    def _model_tag(self) -> dict[str, str]:
        model = self.params.get("promote", {}).get("model_name")
        return {MODEL_TAG: model} if model else {}

    def _create(self, name: str, tags: dict[str, str], *, run_name: str | None = None) -> str:
        whose = {"folder": str(Path.cwd()), PROCESS_TAG: json.dumps(this_process())}
        whose |= {**self.origin, "mlflow.source.name": name}
        whose |= {FLOW_RUN_TAG: self.prefect_run} if self.prefect_run else {}
        run = self.client.create_run(self.experiment_id, run_name=run_name or name, tags={**whose, **tags})
        return str(run.info.run_id)

    def _source_run(self, stage: str, lock_hash: str) -> str | None:
        where = f"tags.stage = '{stage}' and tags.dvc_lock_hash = '{lock_hash}' and attributes.status = 'FINISHED'"
        newest = self.client.search_runs(
            [self.experiment_id], where, max_results=1, order_by=["attributes.start_time DESC"]
        )
        if not newest:
            return None
        # A cached run without a known source has the numbers itself, so it is one.
        run = newest[0]
        source = or_none(lambda: self.client.get_run(run.data.tags.get("source_run_id", run.info.run_id)))
        return str(source.info.run_id) if source and source.info.lifecycle_stage == "active" else None

    def _missing(self, run_id: str, points: list[Point]) -> list[Point]:
        """Those `points` that the run lacks: `train` may have logged most of them live."""
        logged = self.client.get_run(run_id).data.metrics
        have = {key: {item.step for item in self.client.get_metric_history(run_id, key)} for key in logged}
        return [point for point in points if point.step not in have.get(point.key, ())]

    def _log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        rows = [Param(metric_name(name), str(value)[:MAX_PARAM_LENGTH]) for name, value in params.items()]
        for start in range(0, len(rows), MAX_BATCH_PARAMS):
            self.client.log_batch(run_id, params=rows[start : start + MAX_BATCH_PARAMS])

    def _log_metrics(self, run_id: str, points: list[Point]) -> None:
        log_points(self.client, run_id, points)


def close_killed_runs(settings: TrackingSettings) -> None:
    """Close as KILLED what dead flows of this folder left open. The caller holds the folder's lock."""
    if settings.is_missing:
        return
    with mlflow_errors(settings):
        client = connect(settings)
        _close_open_runs(client, experiment_id(client, settings), settings)


def close_ended_runs(settings: TrackingSettings, find_ended: Callable[[set[str]], set[str]]) -> None:
    """Close as KILLED what ended runs of Prefect left open, on whatever machine. `find_ended` says which of these ids
    Prefect shows as ended; it has no word on a run that it does not know.
    """
    if settings.is_missing:
        return
    with mlflow_errors(settings):
        client = connect(settings)
        runs = client.search_runs([experiment_id(client, settings)], "attributes.status = 'RUNNING'")
        ids = {run.info.run_id: run.data.tags.get(FLOW_RUN_TAG) for run in runs}
        known = {flow_run for flow_run in ids.values() if flow_run}
        ended = find_ended(known) if known else set()
        for run_id, flow_run in ids.items():
            if flow_run in ended:
                client.set_terminated(run_id, "KILLED")


def _close_open_runs(client: MlflowClient, experiment: str, settings: TrackingSettings) -> None:
    """Whoever holds the folder's lock is its only flow, so any other RUNNING run of it is dead. On a server another
    machine may have a folder of the same path, so there the process must be known to be gone: calling a working run
    KILLED is worse.
    """
    is_shared, here = settings.database is None, str(Path.cwd())
    # The folder is compared here: MLflow's filter takes no apostrophe in a text.
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'"):
        is_ours = run.data.tags.get("folder") == here
        if is_ours and (not is_shared or is_noted_gone(run.data.tags.get(PROCESS_TAG))):
            client.set_terminated(run.info.run_id, "KILLED")


def origin_tags() -> dict[str, str]:
    """Who ran which commit, under the tags of MLflow's own columns."""
    folder = folder_of_code()
    commit, is_dirty = git_state(folder)
    code = {"commit": commit, "branch": git_branch(folder), "dirty": is_dirty}
    user = {"mlflow.user": operator(), "mlflow.source.type": "LOCAL"}
    return {**user, **{f"mlflow.source.git.{name}": value for name, value in code.items() if value}}


def _tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in tags.items()]
