"""A parent run a flow, a child a stage, made from stage files; a cached stage points at the run that did the work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.settings import Paths, parse_params
from tasks.core.stages import STAGES
from tasks.tracking.connection import absolute_location, absolute_uri, connect, experiment_id
from tasks.tracking.finished_runs import MODEL_TAG, last_finished, record_finished
from tasks.tracking.journal import operator
from tasks.tracking.metrics import CURVES, MAX_METRICS, Point, log_points, log_table
from tasks.tracking.runs import FlowRuns, close_killed_runs
from tasks.tracking.stage_results import StageResults, read_results
from tests.measurement.synthetic import write_artifacts
from tests.tracking.project import SETTINGS

OUTCOME = {
    "decision": "promote", "policy_decision": "promote", "approval": "not_needed", "snapshot": "iteration-0020",
    "registered_model": "travel-desk-agent", "registered_version": 3, "champion": 3, "at": "2026-11-22T12:00:00+00:00",
}  # fmt: skip
PARAMS = {"seed": 7, "train": {"updates_per_batch": 2}, "promote": {"minimum_success": 0.6}, "tracking": {"uri": "x"}}


@pytest.fixture
def finished(project: Paths) -> Paths:
    """A project whose stages have all left their files, and its dvc.lock."""
    write_artifacts(project.artifacts, problems_per_type=2, num_snapshots=2)
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS), encoding="utf-8")
    lock = {"cmd": "python -m tasks train", "params": {"params.yaml": {"train": {"updates_per_batch": 2}, "seed": 7}}}
    Path("dvc.lock").write_text(
        yaml.safe_dump({"schema": "2.0", "stages": {"train": lock, "evaluate": {"cmd": "x"}}}), encoding="utf-8"
    )
    return project


def flow(paths: Paths) -> FlowRuns:
    runs = FlowRuns(SETTINGS, PARAMS, paths)
    runs.begin()
    return runs


def stage(runs: FlowRuns, name: str, *, cached: bool = False) -> Any:
    run_id = runs.begin_stage(name)
    runs.end_stage(name, cached=cached, seconds=1.5)
    return runs.client.get_run(run_id)


@pytest.mark.slow
def test_the_parent_holds_all_params_the_headline_and_the_figures(finished: Paths):
    charts = {"progress.png", "progress.svg"}
    for name in charts:
        (finished.artifacts / name).write_bytes(b"chart")
    runs = flow(finished)
    stage(runs, "train")
    runs.finish()
    parent = runs.client.get_run(runs.parent_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["train.updates_per_batch"] == "2"
    assert parent.data.metrics["seconds/train"] == 1.5
    assert 0.8 < parent.data.metrics["test/best/success_rate"] <= 1
    assert not [key for key in parent.data.metrics if "by_category" in key]
    stored = {file.path for file in runs.client.list_artifacts(runs.parent_id)}
    assert charts | {"decision.json", "params.yaml"} <= stored
    params = runs.client.download_artifacts(runs.parent_id, "params.yaml", str(finished.artifacts))
    assert parse_params(Path(params).read_text(), Path(params)) == runs.params


@pytest.mark.slow
def test_the_parent_has_the_name_of_prefects_run_and_a_child_that_of_its_stage(finished: Paths):
    runs = FlowRuns(SETTINGS, PARAMS, finished, name="shop 2026-11-29 13:56")
    parent, child = (runs.client.get_run(run).info.run_name for run in (runs.begin(), runs.begin_stage("train")))
    assert (parent, child) == ("shop 2026-11-29 13:56", "train")


@pytest.mark.slow
def test_a_stage_is_a_child_with_the_params_dvc_recorded_and_one_point_an_iteration(finished: Paths):
    runs = flow(finished)
    child = stage(runs, "train")
    assert child.data.tags["mlflow.parentRunId"] == runs.parent_id
    assert child.data.tags["cached"] == "false"
    assert child.data.params == {"train.updates_per_batch": "2", "seed": "7"}
    history = runs.client.get_metric_history(child.info.run_id, "success_rate")
    assert [item.step for item in history] == list(range(1, 21))


def test_the_curve_of_snapshots_has_points_of_one_kind_only(finished: Paths):
    """A snapshot that racing dropped was measured on fewer problems: it is in the table, and no point of the curve."""
    file = finished.stage("evaluate") / "evaluation.json"
    evaluation = read_json(file)
    dropped = {**evaluation["select"]["iteration-0010"], "num_problems": 3, "success_rate": 1.0}
    write_json(file, {**evaluation, "select": {**evaluation["select"], "iteration-0005": dropped}})
    results = read_results("evaluate", finished)
    assert sorted(point.step for point in results.points if point.key == "select/success_rate") == [10, 20]
    assert [point.step for point in results.points if point.key == "test/best/success_rate"] == [0]
    rows = {row["policy"]: row["num_problems"] for row in results.tables["policies.json"] if row["split"] == "select"}
    assert rows == {"iteration-0005": 3, "iteration-0010": 22, "iteration-0020": 22}


@pytest.mark.slow
def test_no_run_has_more_than_twenty_metrics_and_the_rest_is_in_tables(finished: Paths):
    rows = [{"iteration": 1, **dict.fromkeys((*CURVES, "mismatch_kl", "success_by_category"), 0.5)}]
    write_jsonl(finished.stage("train") / "metrics.jsonl", rows)
    write_json(finished.stage("promote") / "outcome.json", OUTCOME)
    runs = flow(finished)
    children = {name: stage(runs, name) for name in STAGES}
    runs.finish()
    parent = runs.client.get_run(runs.parent_id)
    for run in (parent, *children.values()):
        assert 0 < len(run.data.metrics) <= MAX_METRICS
    assert {f"seconds/{name}" for name in STAGES} < set(parent.data.metrics)
    assert parent.data.metrics["select/num_problems"] == 22.0  # of the chosen snapshot
    assert table("train", children, runs, "iterations.json")["columns"] == [
        "iteration",
        *CURVES,
        "mismatch_kl",
        "success_by_category",
    ]
    assert len(table("evaluate", children, runs, "categories.json")["data"]) == 5 * 11  # policies by categories


def table(name: str, children: dict[str, Any], runs: FlowRuns, file: str) -> dict[str, Any]:
    """A table of a stage's run as MLflow's page finds it: by the tag, then the file."""
    run = children[name]
    assert {"path": file, "type": "table"} in json.loads(run.data.tags["mlflow.loggedArtifacts"])
    return dict(read_json(Path(runs.client.download_artifacts(run.info.run_id, file))))


@pytest.mark.slow
def test_the_parent_is_found_by_what_the_promotion_came_to_and_who_ran_which_commit(finished: Paths):
    write_json(finished.stage("promote") / "outcome.json", OUTCOME)
    runs = flow(finished)
    runs.finish()
    tags = runs.client.get_run(runs.parent_id).data.tags
    assert tags.items() >= {"decision": "promote", "registered_version": "3", "snapshot": "iteration-0020"}.items()
    assert tags["mlflow.user"] == operator()
    assert tags["mlflow.source.git.commit"] and tags["mlflow.source.git.dirty"]
    where = "tags.decision = 'promote' and tags.registered_version = '3'"
    (found,) = runs.client.search_runs([runs.experiment_id], where)
    assert found.info.run_id == runs.parent_id


def test_a_table_that_is_logged_again_is_not_doubled(project: Paths):
    client = connect(SETTINGS)
    run = client.create_run(experiment_id(client, SETTINGS)).info.run_id
    for _ in range(2):
        log_table(client, run, "rows.json", [{"a": 1}, {"b": {"c": [2]}}])
    logged = read_json(Path(client.download_artifacts(run, "rows.json")))
    assert logged == {"columns": ["a", "b"], "data": [[1, None], [None, '{"c": [2]}']]}
    assert len(json.loads(client.get_run(run).data.tags["mlflow.loggedArtifacts"])) == 1


def test_a_stage_that_left_no_files_has_nothing_to_show(project: Paths):
    assert read_results("train", project) == read_results("evaluate", project) == StageResults()


@pytest.mark.slow
def test_a_cached_stage_names_the_run_that_did_the_work_and_repeats_no_number(finished: Paths):
    first = stage(flow(finished), "train")
    again = stage(flow(finished), "train", cached=True)
    third = stage(flow(finished), "train", cached=True)
    for child in (again, third):
        assert child.data.tags["cached"] == "true"
        assert child.data.tags["source_run_id"] == first.info.run_id
        assert set(child.data.metrics) == {"seconds"}


@pytest.mark.slow
def test_after_any_number_of_cached_stages_the_source_is_known_until_somebody_deletes_it(
    finished: Paths, monkeypatch: pytest.MonkeyPatch
):
    first, runs = stage(flow(finished), "train"), flow(finished)
    assert stage(runs, "train", cached=True).data.tags["source_run_id"] == first.info.run_id
    search = runs.client.search_runs  # as if more were there than one page has
    monkeypatch.setattr(
        runs.client, "search_runs", lambda *given, **named: search(*given, **{**named, "max_results": 1})
    )
    assert stage(runs, "train", cached=True).data.tags["source_run_id"] == first.info.run_id
    runs.client.delete_run(first.info.run_id)
    assert "source_run_id" not in stage(runs, "train", cached=True).data.tags


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bob's runs", 'a "b" c', r"x\y", "100% é"])
def test_what_a_killed_flow_left_open_is_closed_whatever_its_folder_is_called(
    project: Paths, monkeypatch: pytest.MonkeyPatch, name: str
):
    place = Path.cwd() / name
    place.mkdir()
    places = {"uri": absolute_uri(SETTINGS), "artifact_location": absolute_location(SETTINGS)}
    here = SETTINGS.model_copy(update=places)
    flow(project)
    monkeypatch.chdir(place)
    runs = FlowRuns(here, {}, project)
    mine = runs.begin()
    close_killed_runs(here)
    assert [run.info.status for run in runs.client.search_runs([runs.experiment_id])].count("RUNNING") == 1
    assert runs.client.get_run(mine).info.status == "KILLED"


@pytest.mark.slow
def test_a_cached_stage_no_run_knows_holds_the_numbers_itself(finished: Paths):
    """`dvc repro` alone did the work and left no run; the next flow's child then serves as the source."""
    first = stage(flow(finished), "train", cached=True)
    assert first.data.tags["cached"] == "true"
    assert "source_run_id" not in first.data.tags
    assert "success_rate" in first.data.metrics
    assert stage(flow(finished), "train", cached=True).data.tags["source_run_id"] == first.info.run_id


@pytest.mark.slow
def test_a_stage_with_another_entry_in_dvc_lock_is_not_the_same_work(finished: Paths):
    stage(flow(finished), "train")
    Path("dvc.lock").write_text(
        yaml.safe_dump({"schema": "2.0", "stages": {"train": {"cmd": "another"}}}), encoding="utf-8"
    )
    assert "source_run_id" not in stage(flow(finished), "train", cached=True).data.tags


@pytest.mark.slow
def test_points_that_were_logged_live_are_not_logged_twice(finished: Paths):
    runs = flow(finished)
    run_id = runs.begin_stage("train")
    log_points(runs.client, run_id, [Point("success_rate", 0.5, step) for step in (1, 2, 3)])
    runs.end_stage("train", cached=False, seconds=1)
    history = runs.client.get_metric_history(run_id, "success_rate")
    assert sorted(item.step for item in history) == list(range(1, 21))


@pytest.mark.slow
def test_a_run_that_ended_under_a_clock_in_the_future_is_not_the_last_one_for_years(project: Paths):
    client = connect(SETTINGS)
    experiment, now = experiment_id(client, SETTINGS), int(time.time() * 1000)

    def finish(name: str, end: int) -> str:
        run = client.create_run(experiment, tags={"kind": "flow", MODEL_TAG: "m"}).info.run_id
        record_finished(client, run, {"name": name}, project)
        client.set_terminated(run, "FINISHED", end_time=end)
        last = last_finished(SETTINGS, "m", project)
        assert last is not None
        return str(last.inputs["promote"]["name"])

    assert finish("in 2061", 2_871_000_000_000) == "in 2061"  # also where this machine's own clock is behind
    assert finish("today", now - 1000) == "today"
    assert finish("later today", now) == "later today"


def test_a_failed_flow_closes_its_runs_as_failed(finished: Paths):
    runs = flow(finished)
    done, failed = stage(runs, "train").info.run_id, runs.begin_stage("evaluate")
    runs.fail("FAILED")
    statuses = [runs.client.get_run(run_id).info.status for run_id in (done, failed, runs.parent_id)]
    assert statuses == ["FINISHED", "FAILED", "FAILED"]


@pytest.mark.slow
def test_runs_a_killed_flow_left_open_are_closed_by_the_next(finished: Paths):
    killed = flow(finished)
    child = killed.begin_stage("train")
    runs = flow(finished)
    assert runs.client.get_run(killed.parent_id).info.status == "KILLED"
    assert runs.client.get_run(child).info.status == "KILLED"
    assert runs.client.get_run(runs.parent_id).info.status == "RUNNING"
