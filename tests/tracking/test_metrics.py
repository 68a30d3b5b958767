"""Numbers become metrics by their place in the file, and live ones never get in the way of training."""

from __future__ import annotations

import time
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.core.settings import Paths
from tasks.tracking.connection import absolute_uri, connect, experiment_id
from tasks.tracking.metrics import RUN_ID_VARIABLE, URI_VARIABLE, Point, flatten, live_logger, numbers, row_points
from tests.tracking.project import SETTINGS


def test_nested_params_become_dotted_names():
    assert dict(flatten({"train": {"updates_per_batch": 2, "betas": [0.9, 0.98]}, "seed": 7})) == {
        "train.updates_per_batch": 2,
        "train.betas": [0.9, 0.98],
        "seed": 7,
    }


def test_only_finite_numbers_become_metrics():
    row = {
        "rate": 0.5,
        "by_category": {"book/declined": 0.25},
        "gate": "rl",
        "kl": None,
        "loss": float("nan"),
        "all": [1],
    }
    assert numbers(row, "test", 3) == [Point("test/rate", 0.5, 3), Point("test/by_category/book/declined", 0.25, 3)]


def test_a_character_mlflow_refuses_in_a_name_is_replaced():
    assert numbers({"über/größer>2": 1}, "", 0)[0].key == "über/größer_2"


def test_a_row_of_metrics_is_logged_at_the_step_it_names():
    row = {"iteration": 4, "success_rate": 0.5, "mean_parts": {"outcome": 0.4, "brevity": 0.1}, "mean_other": 1}
    assert row_points(row, "iteration") == [
        Point("success_rate", 0.5, 4), Point("mean_parts/outcome", 0.4, 4), Point("mean_parts/brevity", 0.1, 4),
    ]  # fmt: skip


def test_a_stage_that_is_handed_no_run_logs_nowhere():
    assert live_logger({}) is None
    assert live_logger({URI_VARIABLE: "sqlite:///x.db"}) is None


def test_rows_reach_the_run_while_training_goes_on(project: Paths):
    client = connect(SETTINGS)
    run_id = client.create_run(experiment_id(client, SETTINGS)).info.run_id
    log = live_logger({RUN_ID_VARIABLE: run_id, URI_VARIABLE: absolute_uri(SETTINGS)})
    assert log is not None
    before = time.thread_time()
    for iteration in (1, 2, 3):
        log({"iteration": iteration, "success_rate": iteration / 10})
    assert time.thread_time() - before < 0.1  # MLflow is not at work in the thread that trains
    log.close()  # type: ignore[attr-defined]  # what the end of the process does
    history = client.get_metric_history(run_id, "success_rate")
    assert [(item.step, item.value) for item in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.slow
def test_a_run_that_does_not_exist_never_ends_training(project: Paths, capsys):
    log = live_logger({RUN_ID_VARIABLE: "0" * 32, URI_VARIABLE: absolute_uri(SETTINGS)})
    assert log is not None
    log({"iteration": 1, "success_rate": 0.1})
    said = ""
    while "kept and sent later" not in said:
        assert log.thread.is_alive()  # type: ignore[attr-defined]
        said += capsys.readouterr().out
        time.sleep(0.1)
    log.close()  # type: ignore[attr-defined]
    assert not log.thread.is_alive()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_rows_that_mlflow_did_not_take_are_sent_once_with_a_later_batch(
    project: Paths, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The second batch is stored, but its answer is lost; so it comes again, and each step is there once."""
    client = connect(SETTINGS)
    run_id = client.create_run(experiment_id(client, SETTINGS)).info.run_id
    real, batches = MlflowClient.log_batch, []

    def log_batch(self: MlflowClient, *args: Any, **kwargs: Any) -> None:
        batches.append(kwargs["metrics"])
        if len(batches) == 1:
            raise ConnectionError("refused")
        real(self, *args, **kwargs)
        if len(batches) == 2:
            raise ConnectionError("the answer was lost")

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr("tasks.tracking.metrics._LiveLogger.BATCH_SECONDS", 0.1)
    log = live_logger({RUN_ID_VARIABLE: run_id, URI_VARIABLE: absolute_uri(SETTINGS)})
    assert log is not None
    for iteration in (1, 2, 3):
        log({"iteration": iteration, "success_rate": iteration / 10})
        while len(batches) < iteration:
            time.sleep(0.01)
    log.close()  # type: ignore[attr-defined]
    assert [item.step for item in client.get_metric_history(run_id, "success_rate")] == [1, 2, 3]
    assert capsys.readouterr().out.count("kept and sent later") == 1
