"""What MLflow's own pages and search expect: datasets, a model's metrics and params, the commit, assessments."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import write_json, write_jsonl
from tasks.core.settings import Paths
from tasks.tracking.datasets import datasets_of
from tasks.tracking.journal import operator
from tasks.tracking.registry import Registry
from tasks.tracking.runs import FlowRuns
from tasks.tracking.traces import log_traces
from tests.measurement.synthetic import trajectory
from tests.rewards.shaped import shaped
from tests.tracking.candidates import CARD, MODEL, candidate
from tests.tracking.project import SETTINGS
from tests.tracking.test_traces import problem_row

DEPS = {"train": "aa" * 16, "select": "bb" * 16, "test": "cc" * 16}


def lock(paths: Paths, **stages: list[str]) -> None:
    """A dvc.lock in which stages read splits."""
    code = {"path": "tasks/core", "md5": "dd" * 16}
    recorded = {
        stage: {"cmd": "x", "deps": [code, *({"path": str(paths.split(name)), "md5": DEPS[name]} for name in names)]}
        for stage, names in stages.items()
    }
    Path("dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": recorded}), encoding="utf-8")


@pytest.mark.slow
def test_a_stage_shows_the_splits_it_read_under_dvcs_hash_and_what_for(project: Paths):
    write_json(project.stage("curate") / "card.json", {**CARD, "num_problems": {"train": 9, "select": 4, "test": 5}})
    lock(project, evaluate=["select", "test"], train=["train"])
    runs = FlowRuns(SETTINGS, {}, project)
    runs.begin()
    run_id = runs.begin_stage("evaluate")
    runs.end_stage("evaluate", cached=False, seconds=1.0)
    inputs = runs.client.get_run(run_id).inputs.dataset_inputs
    contexts = {item.dataset.name: {tag.key: tag.value for tag in item.tags} for item in inputs}
    assert contexts == {
        "select": {"mlflow.data.context": "selection"},
        "test": {"mlflow.data.context": "test"},
    }
    assert {item.dataset.name: item.dataset.digest for item in inputs} == {"select": "bb" * 16, "test": "cc" * 16}
    assert {json.loads(item.dataset.profile)["num_problems"] for item in inputs} == {4, 5}


def test_promotion_which_dvc_does_not_run_has_the_md5_that_dvc_would_give(project: Paths):
    write_jsonl(project.split("test"), [{"id": "p0"}])
    (found,) = datasets_of("promote", project)
    assert found.digest == hashlib.md5(project.split("test").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrain", "train"])
def test_every_run_names_the_commit_the_branch_and_whether_files_differ(project: Paths, name: str):
    runs = FlowRuns(SETTINGS, {}, project)
    run_id = runs.begin() if name == "retrain" else runs.begin() and runs.begin_stage(name)
    tags = runs.client.get_run(run_id).data.tags
    assert tags["mlflow.source.git.commit"] == "none"  # the test's folder is outside git
    assert tags["mlflow.source.git.dirty"] == "unknown"
    assert (tags["mlflow.source.name"], tags["mlflow.user"]) == (name, operator())


@pytest.mark.slow
def test_a_registered_model_has_its_params_and_its_results_with_run_and_dataset(project: Paths):
    registry, runs = Registry(SETTINGS, MODEL), FlowRuns(SETTINGS, {}, project)
    runs.begin()
    run_id, challenger = runs.begin_stage("promote"), candidate("a")
    lock(project, evaluate=["select", "test"])
    registry.make_model()
    for number in ("1", "2"):  # a second time, and nothing is doubled
        lineage = project.artifacts / number
        write_json(lineage / "evaluation.json", challenger.evaluation)
        (lineage / "params.yaml").write_text("promote: {minimum_success: 0.6}", encoding="utf-8")
        shutil.copy("dvc.lock", lineage)
        tags = {"mlflow.source.git.commit": "c0de"}
        named: dict[str, Any] = {"folder_hash": challenger.files, "run_id": run_id, "check": lambda: None}
        version = registry.register(challenger.folder, weights="w", tags=tags, lineage=lineage, **named)
    (model,) = registry.client.search_logged_models([registry.experiment_id])
    assert registry.client.get_model_version(MODEL, str(version.version)).source == f"models:/{model.model_id}"
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": MODEL, "version": version.version}]
    assert model.params["promote.minimum_success"] == "0.6"
    assert model.tags["mlflow.source.git.commit"] == version.tags["mlflow.source.git.commit"] == "c0de"
    found = {item.key: item for item in model.metrics}
    best = found["test/best/success_rate"]
    assert (best.value, best.dataset_name, best.dataset_digest) == (0.95, "test", "cc" * 16)
    assert found["select/success_rate"].dataset_digest == "bb" * 16
    assert best.run_id == runs.parent_id == model.source_run_id
    outputs = registry.client.get_run(runs.parent_id).outputs.model_outputs
    assert [output.model_id for output in outputs] == [model.model_id]
    history = registry.client.get_metric_history(runs.parent_id, "test/best/success_rate")
    assert len(history) == 1


@pytest.mark.slow
def test_an_outcome_is_an_assessment_and_episodes_of_a_problem_are_a_session(project: Paths):
    won, lost = trajectory("p0", True), trajectory("p0", False)
    lost.checks = {"booked": False, "polite": True}
    broken = trajectory("p0", False)
    broken.outcome, broken.fault = "environment_error", "search: timed out"
    for policy, episode in (("best", won), ("warm_start", lost), ("base", broken)):
        file = project.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"
        write_jsonl(file, [episode.to_row()])
    write_jsonl(project.split("test"), [problem_row("p0")])
    runs = FlowRuns(SETTINGS, {}, project)
    runs.begin()
    rewards = shaped(format=0.2, call_validity=0.1)
    place = {"experiment_id": runs.experiment_id, "run_id": runs.parent_id, "evaluation": ""}
    assert log_traces(runs.client, project, rewards, most=9, **place) == 3
    found = runs.client.search_traces(locations=[runs.experiment_id])
    verdicts: dict[str, Any] = {}
    for trace in found:
        assert trace.info.trace_metadata["mlflow.trace.session"] == "p0"
        assert trace.info.trace_metadata["mlflow.trace.user"] == operator()
        verdicts[trace.info.tags["policy"]] = {item.name: item for item in trace.info.assessments}
    assert {policy: item["success"].feedback.value for policy, item in verdicts.items()} == {
        "best": True,
        "warm_start": False,
        "base": None,
    }
    assert verdicts["best"]["success"].source.source_type == "CODE"
    assert verdicts["warm_start"]["success"].rationale == "booked"
    assert verdicts["base"]["success"].feedback.error.error_message == "search: timed out"
    assert verdicts["best"]["reward"].feedback.value > verdicts["warm_start"]["reward"].feedback.value
