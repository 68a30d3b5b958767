"""Why a run is needed: what changed since the last finished run, wherever that ran, and what a killed one left.

DVC's word is given here; that `dvc status` says so of real files is at the end, and in test_flow.py of whole runs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows.processes import child_environment
from tasks.core.files import read_json, write_json
from tasks.core.provenance import RECORDED
from tasks.core.settings import Paths, read_params
from tasks.drift.fall import last_fall
from tasks.pipeline import reasons as module
from tasks.pipeline.reasons import Reason, RunReasons, begin_run, find_reasons, find_unchanged
from tasks.tracking import finish_seen
from tasks.tracking.connection import connect
from tasks.tracking.finish_seen import note_finish, recall_finish
from tasks.tracking.finished_runs import FINISHED_FILE, REASONS_FILE, read_kept
from tasks.tracking.journal import new_entry
from tasks.tracking.measurements import CHAMPION_CHECK, ROW_TAG, log_measurement, read_checks
from tasks.tracking.runs import FlowRuns
from tests.conftest import ROOT
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project
from tests.tracking.project import SETTINGS, enter_project_again

MODEL = "travel-desk-agent"
SOURCE = "data/problems.jsonl"
Change = Callable[[dict[str, Any]], None]


class Workspace:
    """A folder with params.yaml and dvc.lock, and what `dvc status` and the drift check say in it."""

    def __init__(self, paths: Paths):
        self.paths = paths
        self.status: dict[str, Any] = {}
        self.drift: list[str] = []

    def reasons(self, **asked: Any) -> RunReasons:
        return find_reasons(read_params(), self.paths, **asked)

    def texts(self, **asked: Any) -> list[str]:
        return [f"{reason.kind}: {reason.text}" for reason in self.reasons(**asked).reasons]

    def begin(self, **asked: Any) -> str | None:
        return begin_run(self.reasons(**asked), read_params(), self.paths)

    def flow(self, *, ends: bool = True) -> FlowRuns:
        """A flow's parent run, as far as its end or its death."""
        runs = FlowRuns(SETTINGS, read_params(), self.paths)
        runs.begin()
        if ends:
            write_lock()
            runs.finish()
        return runs

    def set(self, section: str, key: str, value: Any) -> None:
        params = read_params()
        params[section][key] = value
        Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")


def write_lock(change: Change = lambda stages: None) -> None:
    """As DVC writes it after a run on today's params."""
    params = read_params()
    stages = {
        "curate": {
            "cmd": "python -m tasks curate",
            "deps": [{"path": SOURCE, "md5": "a1"}, {"path": "tasks/core", "md5": "b1"}],
            "params": {"params.yaml": {name: params[name] for name in ("curate", "environment", "seed")}},
            "outs": [{"path": "artifacts/curate", "md5": "c1"}],
        },
        "train": {
            "cmd": "python -m tasks train",
            "deps": [{"path": "artifacts/curate/train.jsonl", "md5": "d1"}, {"path": "tasks/learning", "md5": "e1"}],
            "params": {"params.yaml": {name: params[name] for name in ("seed", "train")}},
            "outs": [{"path": "artifacts/train", "md5": "f1"}],
        },
    }
    change(stages)
    Path("dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}), encoding="utf-8")


@pytest.fixture
def workspace(used_folder: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    workspace = Workspace(enter_project_again(used_folder, empty_database, monkeypatch))
    Path("params.yaml").write_bytes((ROOT / "infra" / "profiles" / "demo.yaml").read_bytes())
    monkeypatch.setattr(module, "read_status", lambda: workspace.status)
    monkeypatch.setattr(module, "find_drift", lambda settings, paths: workspace.drift)
    return workspace


@pytest.fixture
def finished(workspace: Workspace) -> Workspace:
    write_json(
        workspace.paths.stage("promote") / "outcome.json",
        {"decision": "promote", "registered_version": 4, "champion": 4, "approval": "not_needed"},
    )
    workspace.flow()
    return workspace


@pytest.mark.slow
def test_a_first_run_has_that_as_its_reason_and_mlflow_and_the_folder_know_it(workspace: Workspace):
    (text,) = workspace.texts()
    assert text.startswith(f"first: the first run of {MODEL}")
    assert workspace.begin() is None
    tags = tags_of(workspace.flow(ends=False))
    assert tags["reason_kinds"] == "first"
    assert tags["reason"].startswith("the first run of")
    assert tags["model"] == MODEL


@pytest.mark.slow
def test_nothing_changed_since_a_finished_run_names_it_and_its_outcome(finished: Workspace):
    found = finished.reasons()
    assert not found.is_needed
    assert found.last is not None
    assert found.last.run_id[:8] in found.sentence
    assert "nothing changed since run" in found.sentence
    assert "promoted version 4" in found.sentence


@pytest.mark.slow
def test_a_waiting_decision_that_ended_unapproved_is_a_reason_to_decide_anew(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    outcome = {"decision": "hold", "registered_version": 4, "champion": 3, "approval": "waiting"}
    write_json(workspace.paths.stage("promote") / "outcome.json", outcome)
    workspace.flow()
    monkeypatch.setattr(module, "ended_unapproved", lambda registry: None)
    assert workspace.texts() == [] and "(hold, waits for approval)" in workspace.reasons().sentence
    approval = new_entry("approval", {"version": 4, "reason": "looked at it"}, by="Jane Doe")
    monkeypatch.setattr(module, "last_waiting_entry", lambda registry: approval)
    assert "(version 4 approved since by Jane Doe)" in workspace.reasons().sentence
    monkeypatch.setattr(module, "ended_unapproved", lambda registry: "the decision about version 4 expired")
    assert workspace.texts() == ["decision: the decision about version 4 expired"]


@pytest.mark.slow
def test_another_machine_learns_of_the_finished_run_from_mlflow_alone(finished: Workspace):
    kept = read_kept(finished.paths)
    (finished.paths.artifacts / FINISHED_FILE).unlink()
    found = finished.reasons()
    assert found.last == kept
    assert not found.is_needed


@pytest.mark.slow
def test_results_that_are_not_in_this_folder_are_no_reason(finished: Workspace):
    finished.status = {
        "curate": [{"changed outs": {"artifacts/curate": "deleted"}}],
        "train": [{"changed deps": {"artifacts/curate/train.jsonl": "deleted"}}],
    }
    assert finished.texts() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"curate": [{"changed deps": {SOURCE: "modified"}}]}, f"data: data changed: {SOURCE}"),
        (
            {
                "train": [{"changed deps": {"tasks/learning": "modified"}}],
                "curate": [{"changed deps": {"tasks/core": "modified"}}],
            },
            "code: code changed: tasks/core, tasks/learning",
        ),
        ({"train": ["changed command"]}, "code: code changed: dvc.yaml"),
        ({"train": [{"changed outs": {"artifacts/train": "modified"}}]}, "data: results were edited: artifacts/train"),
    ],
)  # fmt: skip
def test_what_dvc_sees_changed_is_named(finished: Workspace, status: dict[str, Any], text: str):
    finished.status = status
    assert finished.texts() == [text]


@pytest.mark.slow
def test_a_changed_setting_of_a_stage_or_of_promote_is_told_with_both_values(finished: Workspace):
    finished.set("train", "group_size", 5)
    finished.set("promote", "minimum_success", 0.7)
    assert finished.texts() == [
        "recipe: the policy of promotion changed: promote.minimum_success 0.6 → 0.7",
        "recipe: the recipe changed: train.group_size 8 → 5",
    ]


@pytest.mark.slow
def test_a_setting_that_no_stage_and_no_decision_reads_is_no_reason(finished: Workspace):
    finished.set("tracking", "num_traces", 3)
    assert finished.texts() == []


@pytest.mark.slow
def test_what_dvc_ran_by_hand_or_in_a_run_that_died_is_a_reason_until_a_run_finishes(finished: Workspace):
    """dvc.lock has the new problems, and `dvc status` nothing to say; only no run finished with them."""

    def bring_new_problems(stages: dict[str, Any]) -> None:
        stages["curate"]["deps"][0]["md5"] = "a2"
        stages["train"]["deps"][0]["md5"] = "d2"

    write_lock(bring_new_problems)
    assert finished.texts() == [f"data: data changed: {SOURCE}"]
    runs = FlowRuns(SETTINGS, read_params(), finished.paths)
    runs.begin()
    runs.finish()
    assert finished.texts() == []


@pytest.mark.slow
def test_drift_curates_anew_by_force_and_outlives_a_run_that_died(finished: Workspace):
    finished.drift = ["reply of get_flight: cost: type number → string"]
    found = finished.reasons()
    assert found.kinds == ["drift"]
    assert [stage for stage in RECORDED if found.is_forced(stage)] == ["curate"]
    finished.begin()
    finished.flow(ends=False)
    finished.drift = []  # the new pin is there; what depends on it is not
    (text,) = finished.texts()
    assert "a run that did not finish had" in text
    assert "get_flight" in text
    found = finished.reasons()
    assert not found.is_forced("curate")  # it has curated for that: DVC finds nothing to do
    finished.status = {"curate": [{"changed outs": {"artifacts/curate": "deleted"}}]}
    assert found.is_forced("curate")
    finished.status = {}
    finished.begin()
    finished.flow()
    assert finished.texts() == []
    assert not (finished.paths.artifacts / REASONS_FILE).exists()


@pytest.mark.slow
def test_a_persons_reason_lets_dvc_decide_what_runs(finished: Workspace):
    found = finished.reasons(asked="a new  judge\nmodel")
    assert [reason.kind for reason in found.reasons] == ["person"]
    assert "a new judge model" in found.sentence
    assert not any(found.is_forced(stage) for stage in RECORDED)
    assert begin_run(found, read_params(), finished.paths) is None
    assert read_params()["seed"] == 11


@pytest.mark.slow
def test_force_needs_a_reason_and_takes_the_next_seed_once(finished: Workspace):
    with pytest.raises(ValueError, match="--reason"):
        finished.reasons(force=True)
    before = Path("params.yaml").read_text(encoding="utf-8")
    line = finished.begin(asked="the graphics card was faulty", force=True)
    assert line is not None
    assert "seed is 12" in line
    assert Path("params.yaml").read_text(encoding="utf-8") == before.replace("seed: 11 ", "seed: 12 ", 1)
    finished.flow(ends=False)
    again = finished.reasons(asked="the graphics card was faulty", force=True)
    assert "recipe" in again.kinds  # the run that died had raised it
    told = begin_run(again, read_params(), finished.paths)
    assert told is not None and told.startswith("seed stays 12, ")
    assert read_params()["seed"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "seed"), [([], 11), (["curate"], 11), (["curate", "train"], 12)])
def test_force_before_any_run_has_finished_trains_with_another_seed_than_the_one_that_failed(
    workspace: Workspace, stages: list[str], seed: int
):
    """dvc.lock has what the failed run made: nothing, the problems alone, or a model too."""

    def keep_only(entries: dict[str, Any]) -> None:
        for stage in set(entries).difference(stages):
            del entries[stage]

    write_lock(keep_only)
    workspace.begin(asked="the weights look odd", force=True)
    assert read_params()["seed"] == seed
    workspace.begin(asked="the weights look odd", force=True)  # killed before it trained
    assert read_params()["seed"] == seed


@pytest.mark.slow
def test_a_seed_that_cannot_be_raised_is_refused_with_nothing_written(finished: Workspace):
    params = Path("params.yaml").read_text(encoding="utf-8")
    anchored = params.replace("seed: 11 ", "seed: &seed 11 ", 1).replace("split_seed: 1 ", "split_seed: *seed ", 1)
    Path("params.yaml").write_text(anchored, encoding="utf-8")
    with pytest.raises(ValueError, match=r"seed could not be raised"):
        finished.begin(asked="again", force=True)
    assert Path("params.yaml").read_text(encoding="utf-8") == anchored
    assert not (finished.paths.artifacts / REASONS_FILE).exists()


def check(champion: int, *, fell: bool) -> dict[str, Any]:
    return {
        "number": 1, "at": "2026-11-22T03:00:00+00:00", "champion": champion, "fell": fell, "alpha": 0.001,
        "most_change": -0.188, "success_rate": 0.6, "ci_low": 0.5, "ci_high": 0.7,
        "promoted": {"success_rate": 0.9, "ci_low": 0.85, "ci_high": 0.95},
    }  # fmt: skip


@pytest.fixture
def champion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_champion", lambda registry, *, quietly: SimpleNamespace(version=4))


@pytest.mark.slow
def test_a_champion_that_somebody_clicked_is_told_before_anything_trains(finished: Workspace):
    assert finished.texts() == []
    client = connect(SETTINGS)
    client.create_registered_model(MODEL)
    client.create_model_version(MODEL, "nowhere")
    client.set_registered_model_alias(MODEL, "champion", "1")
    with pytest.raises(ValueError, match=r"the alias champion names version 1 in MLflow, by hand.*registry restore"):
        finished.reasons(asked="tonight")


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
def test_a_fall_trains_anew_with_the_next_seed_against_a_champion_measured_anew_and_once(finished: Workspace):
    log_measurement(SETTINGS, CHAMPION_CHECK, "check", check(4, fell=True), model=MODEL)
    (text,) = finished.texts()
    assert text.startswith("champion_fell: version 4 fell from 90.0% to 60.0%, by 18.8 points or more")
    line = finished.begin()
    assert line is not None
    assert "seed is 12" in line
    assert last_fall(finished.paths) is not None
    finished.flow()
    assert finished.texts() == []  # answered: the champion stayed
    log_measurement(SETTINGS, CHAMPION_CHECK, "check", check(4, fell=True), model=MODEL)
    assert finished.texts() == []


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
@pytest.mark.parametrize(
    "edited", ["{}", "[]", "null", '"x"', "{", json.dumps({**check(4, fell=True), "at": "yesterday", "alpha": None})]
)
def test_a_check_whose_tag_was_edited_by_hand_is_left_out(finished: Workspace, edited: str):
    number = log_measurement(SETTINGS, CHAMPION_CHECK, "check", check(4, fell=True), model=MODEL)
    connect(SETTINGS).set_tag(number, ROW_TAG, edited)
    assert read_checks(SETTINGS, MODEL) == []
    assert finished.texts() == []


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
@pytest.mark.parametrize("row", [check(4, fell=False), check(3, fell=True)])
def test_a_champion_that_holds_its_level_or_was_replaced_is_no_reason(finished: Workspace, row: dict[str, Any]):
    log_measurement(SETTINGS, CHAMPION_CHECK, "check", row, model=MODEL)
    assert finished.texts() == []


@pytest.mark.slow
def test_a_damaged_note_of_this_folder_is_read_from_mlflow_and_a_deleted_one_there_makes_a_first_run(
    finished: Workspace,
):
    (finished.paths.artifacts / FINISHED_FILE).write_text("{", encoding="utf-8")
    assert finished.texts() == []
    client = connect(SETTINGS)
    runs = client.search_runs([client.get_experiment_by_name("travel-desk").experiment_id], "tags.kind = 'flow'")
    for run in runs:
        client.delete_run(run.info.run_id)
    assert finished.reasons().kinds == ["first"]


@pytest.mark.slow
def test_an_unchanged_folder_is_known_without_mlflow_until_its_database_or_anything_else_changes(finished: Workspace):
    def found() -> RunReasons | None:
        return find_unchanged(read_params(), finished.paths)

    assert found() is None  # nobody asked MLflow yet
    note_finish(SETTINGS, MODEL, finished.paths)
    known = found()
    assert known is not None and known.sentence == finished.reasons().sentence
    assert recall_finish(SETTINGS, "another-model", finished.paths) is None
    finished.drift = ["a tool"]
    assert found() is None
    finished.drift, finished.status = [], {"train": ["changed command"]}
    assert found() is None
    finished.status = {}
    assert found() is not None
    finished.flow(ends=False)  # writes into the database
    assert found() is None


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
def test_a_drift_check_or_a_decision_that_waits_leaves_the_answer_to_mlflow(finished: Workspace):
    note_finish(SETTINGS, MODEL, finished.paths)
    log_measurement(SETTINGS, CHAMPION_CHECK, "check", check(4, fell=True), model=MODEL)
    note_finish(SETTINGS, MODEL, finished.paths)
    assert find_unchanged(read_params(), finished.paths) is None
    assert finished.reasons().kinds == ["champion_fell"]


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
def test_a_fall_that_is_stored_while_mlflow_is_asked_is_not_missed(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch
):
    def read(*asked: Any) -> list[dict[str, Any]]:
        found = read_checks(*asked)
        log_measurement(SETTINGS, CHAMPION_CHECK, "check", check(4, fell=True), model=MODEL)
        return found

    monkeypatch.setattr(finish_seen, "read_checks", read)
    note_finish(SETTINGS, MODEL, finished.paths)
    assert find_unchanged(read_params(), finished.paths) is None
    assert finished.reasons().kinds == ["champion_fell"]


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("database is locked"), OSError("no space left on device")])
def test_a_run_stays_finished_where_its_note_cannot_be_written(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    from flows import retrain

    def refuse(*args: Any) -> None:
        raise error

    lines: list[str] = []
    note_finish(SETTINGS, MODEL, finished.paths)
    monkeypatch.setattr(finish_seen, "last_finished", refuse)
    monkeypatch.setattr(retrain, "_tell", lambda stages, line: lines.append(line))
    retrain._note_finish(read_params(), finished.paths, None)  # type: ignore[arg-type]
    (line,) = lines
    assert line.startswith("warning: ") and str(error) in line
    assert find_unchanged(read_params(), finished.paths) is None  # the old note is gone


def tags_of(runs: FlowRuns) -> Mapping[str, str]:
    return dict(runs.client.get_run(runs.parent_id).data.tags)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_toy_project(tmp_path_factory.mktemp("reasons") / "project")
    project.repro()
    return project


def changes(before: dict[str, Any]) -> list[Reason]:
    now = {**module.inputs_now({}), "params": read_params()}
    return module.find_changes(before, now, module.read_status(), Paths("artifacts"))


@pytest.mark.slow
def test_real_dvc_says_what_changed(toy: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(toy.folder)
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    before = module.inputs_now({})
    assert changes(before) == []
    toy.set_params({"train.group_size": 99})
    with (toy.folder / "toy_stage.py").open("a", encoding="utf-8") as stream:
        stream.write("# edited\n")
    found = changes(before)
    assert [reason.kind for reason in found] == ["recipe", "data"]
    assert "train.group_size" in found[0].text
    assert "toy_stage.py" in found[1].text


def test_dvc_is_asked_with_the_notes_that_a_flow_s_stages_have(monkeypatch: pytest.MonkeyPatch):
    """Else it would hash each file of a model once more."""
    asked: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.update(env)
        return subprocess.CompletedProcess(command, 0, stdout="{}")

    monkeypatch.setenv("DVC_SITE_CACHE_DIR", "/var/cache/dvc")
    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.read_status() == {}
    assert asked["DVC_SITE_CACHE_DIR"] == child_environment()["DVC_SITE_CACHE_DIR"]


@pytest.mark.slow
def test_dvc_that_cannot_say_is_one_line_with_what_to_do(toy: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(toy.folder)
    graph = (toy.folder / "dvc.yaml").read_text(encoding="utf-8")
    (toy.folder / "dvc.yaml").write_text("stages: [", encoding="utf-8")
    try:
        with pytest.raises(ValueError, match="dvc status") as error:
            module.read_status()
        assert "\n" not in str(error.value)
    finally:
        (toy.folder / "dvc.yaml").write_text(graph, encoding="utf-8")


@pytest.mark.slow
def test_the_record_of_a_finished_run_is_plain_json_without_results_of_other_stages(finished: Workspace):
    row = read_json(finished.paths.artifacts / FINISHED_FILE)
    assert json.loads(json.dumps(row)) == row
    assert row["inputs"]["stages"]["train"]["deps"] == {"tasks/learning": "e1"}
    assert row["inputs"]["stages"]["curate"]["deps"] == {SOURCE: "a1", "tasks/core": "b1"}
