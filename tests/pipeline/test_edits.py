"""What is edited while a stage runs counts from the next run: neither DVC nor the record takes it for what the stage
ran with, the flow stops before the next stage, and undoing the edit costs nothing.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from flows.steps import REPRO
from tasks.core.files import content_hash, dvc_md5, read_json, read_yaml
from tasks.core.provenance import RECORDED
from tasks.core.settings import Paths, read_params
from tasks.pipeline.reasons import find_changes, read_status
from tasks.tracking.finished_runs import inputs_now
from tests.pipeline.project import Project
from tests.pipeline.toy_project import CODE, DATA, make_toy_project, release_knobs, turn_knob

pytestmark = pytest.mark.flow
AS_A_FLOW = ("tasks.core.forked", REPRO, "--single-item")
SETTINGS = {"curate": "curate.test_rotation", "train": "train.group_size"}  # the toys of other stages watch none
PARAMS = Path("params.yaml")
WAIT_SECONDS = 120.0


@pytest.fixture
def toy(tmp_path: Path, databases: Path, prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Project:
    project = make_toy_project(tmp_path / "project").lay(databases)
    project.server = prefect
    monkeypatch.chdir(project.folder)
    for name, value in project.environment().items():
        monkeypatch.setenv(name, value)
    return project


def edit_while(
    stage: str, toy: Project, *command: str, early: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[Path, bytes]]:
    """Start the command and edit a setting and a file while the stage runs, with `early` the setting alone before the
    stage has read it; how it ended, and the files before.
    """
    before = {file: file.read_bytes() for file in (PARAMS, Path(CODE))}
    pid_file = toy.artifacts / f".{stage}.pid"
    pid_file.unlink(missing_ok=True)
    turn_knob(toy, f"early_{stage}" if early else f"hold_{stage}")
    process = toy.start(*command)
    wait_for(pid_file, process)
    if stage in SETTINGS:
        section, key = SETTINGS[stage].split(".")
        toy.set_params({SETTINGS[stage]: toy.params()[section][key] + 4})
    if not early:
        Path(CODE).write_bytes(before[Path(CODE)] + b"# edited\n")
    release_knobs(toy)
    output, errors = process.communicate(timeout=WAIT_SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, output, errors), before


def wait_for(pid_file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not pid_file.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def undo(before: dict[Path, bytes]) -> None:
    for file, content in before.items():
        file.write_bytes(content)


def changes_of(stage: str) -> list[str]:
    now = {**inputs_now({}), "params": read_params()}
    status = {name: changes for name, changes in read_status().items() if name == stage}
    return [reason.text for reason in find_changes(inputs_now({}), now, status, Paths("artifacts"))]


@pytest.mark.parametrize("force", [False, True])
def test_dvc_records_what_each_stage_began_with_and_an_edit_meanwhile_is_a_reason_until_it_is_undone(
    toy: Project, force: bool
):
    for stage in RECORDED[: 1 if force else None]:
        done, before = edit_while(stage, toy, *AS_A_FLOW, *(["--force"] if force else []), stage)
        assert done.returncode == 0, done.stderr
        told = ", ".join(changes_of(stage))
        assert CODE in told and SETTINGS.get(stage, "") in told
        undo(before)
        assert changes_of(stage) == []
        locked = read_yaml(Path("dvc.lock"))["stages"][stage]
        record = read_json(Path(f"artifacts/provenance/{stage}.json"))
        assert {item["path"]: item["md5"] for item in locked["deps"]}[CODE] == dvc_md5(Path(CODE))
        assert record["data"][CODE] == content_hash(Path(CODE))
        assert record["settings"] == {name: read_params()[name] for name in record["settings"]}


def test_a_flow_stops_after_the_stage_that_was_edited_and_goes_on_once_the_edit_is_undone(toy: Project):
    done, before = edit_while("train", toy, "flows", "run")
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "curate: toy_stage.py was changed" in error and "nothing after train ran" in error
    undo(before)
    toy.flow()
    cached = read_json(toy.artifacts / "run.json")["cached"]
    assert {stage for stage in cached if cached[stage]} == {"curate", "assess", "warm_start", "train"}
    assert toy.versions() == [1]


def test_problems_that_come_while_a_flow_trains_are_the_reason_of_the_next_and_stop_nothing(toy: Project):
    toy.set_params({"curate.source": DATA})
    turn_knob(toy, "hold_train")
    process = toy.start("flows", "run")
    wait_for(toy.artifacts / ".train.pid", process)
    with Path(DATA).open("a", encoding="utf-8") as stream:
        stream.write("p200\n")
    release_knobs(toy)
    assert process.communicate(timeout=WAIT_SECONDS) and process.returncode == 0
    assert toy.versions() == [1]
    assert changes_of("curate") == [f"data changed: {DATA}"]


def test_an_edit_after_dvc_began_a_stage_and_before_it_read_params_stops_the_flow_and_its_results_are_kept(
    toy: Project,
):
    done, _ = edit_while("train", toy, "flows", "run", early=True)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "train: dvc.lock: it has train.group_size" in error and "nothing after train ran" in error
    assert toy.run("dvc", "commit", "-f", "train").returncode == 0
    toy.flow()
    assert read_json(toy.artifacts / "run.json")["cached"]["train"] is True
    assert toy.versions() == [1]


def test_after_an_edit_under_a_plain_dvc_repro_promotion_names_a_way_out_that_is_one(toy: Project):
    """DVC took the edit for what train ran with; the record did not."""
    done, before = edit_while("train", toy, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    undo(before)
    told = toy.run("tasks", "promote").stderr
    assert "`dvc commit -f train`" in told and "undo" not in told
    assert toy.run("dvc", "commit", "-f", "train").returncode == 0
    assert list(toy.changed()) == ["evaluate"]  # which ran with the edit


def test_what_a_plain_dvc_repro_cached_under_an_edit_is_made_again_by_the_next_flow(toy: Project):
    """Train ran without the edit; evaluate and what is before train run for the edit anyway."""
    done, _ = edit_while("train", toy, "dvc", "repro", "train")
    assert done.returncode == 0, done.stderr
    output = toy.flow()
    assert output.count("is not of that, so train runs again") == 1 and "train.group_size" in output
    assert read_json(toy.artifacts / "run.json")["cached"]["train"] is False
    assert read_json(Path("artifacts/provenance/train.json"))["settings"]["train"] == read_params()["train"]
    assert toy.versions() == [1]
