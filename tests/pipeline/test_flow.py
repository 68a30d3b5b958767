"""`python -m flows run` from the first stage to the champion, twice, and through everything that can end it early.

The stages are toys that take a blink (`toy_project.py`); DVC, Prefect, MLflow, promotion and report are the real ones.
"""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.server import PASSWORD_FILE
from flows.steps import REPRO
from tasks.core.files import read_json
from tests.pipeline.prefect_api import api_of, server_of
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project, release_knobs, turn_knob

pytestmark = pytest.mark.flow

STAGES = ("curate", "assess", "warm_start", "train", "evaluate", "promote")
RERUN_SECONDS = (
    12  # an unchanged run keeps one processor busy for 1.4 s; a busy machine's processor may be half as fast
)
WAIT_SECONDS = 600


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect: dict[str, str]) -> tuple[Project, str]:
    """A project after its first flow, which started its own Prefect server, and what that wrote. Later ones use the
    server of all tests.
    """
    project = make_toy_project(tmp_path_factory.mktemp("flow") / "pro [ject] ü#'1'")
    project.has_own_forks = True
    output = project.flow()
    project.server = prefect
    return project, output


@pytest.fixture
def project(tmp_path: Path, databases: Path) -> Iterator[Project]:
    """A project that has run nothing yet; whatever a test leaves running in it is ended."""
    project = make_toy_project(tmp_path / "project").lay(databases)
    yield project
    for process in project.processes():
        process.kill()


def children(project: Project) -> dict[str, Any]:
    """The children of the newest parent run, by stage."""
    return {
        run.data.tags["stage"]: run
        for run in runs(project, f"tags.mlflow.parentRunId = '{parent(project).info.run_id}'")
    }


def parent(project: Project) -> Any:
    return runs(project, "tags.kind = 'flow'")[0]


def runs(project: Project, where: str) -> list[Any]:
    client = project.mlflow()
    experiment = client.get_experiment_by_name("travel-desk")
    return list(client.search_runs([experiment.experiment_id], where, order_by=["attributes.start_time DESC"]))


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_there():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def child_seconds() -> float:
    """Processor time of all children so far: what they cost, whoever else is at work on the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_until(project: Project, stage: str) -> subprocess.Popen[str]:
    """A flow in the background, as far as the moment `stage` is at work."""
    (project.artifacts / f".{stage}.pid").unlink(missing_ok=True)
    flow = project.start("flows", "run")
    wait_for(lambda: is_at_work(project, stage))
    return flow


def is_at_work(project: Project, stage: str) -> bool:
    pid_file = project.artifacts / f".{stage}.pid"
    return pid_file.exists() and bool(pid_file.read_text())


def prefect_states(project: Project) -> list[str]:
    with closing(sqlite3.connect(project.artifacts / ".prefect" / "prefect.db")) as database:
        return [state for (state,) in database.execute("SELECT state_type FROM flow_run ORDER BY created DESC")]


@pytest.mark.usefixtures("scheduled_toy")  # whose first run comes meanwhile (test_schedule.py)
def test_the_first_run_ends_with_a_champion_and_says_so(finished: tuple[Project, str]):
    project, output = finished
    record = read_json(project.artifacts / "run.json")
    assert record["champion"] == {"model": "travel-desk-agent", "version": 1, "alias": "champion", "promoted": True}
    assert "travel-desk-agent version 1 became the champion" in output
    assert output.count("Against the warm start (") == 1
    assert set(record["cached"].values()) == {False}
    assert (project.artifacts / "report" / "index.html").exists()
    assert read_json(project.artifacts / "summary.json")["champion"]["promoted"] is True


def test_every_command_of_a_flow_is_a_fork(finished: tuple[Project, str]):
    project, _ = finished
    told = (project.artifacts / ".forks.log").read_text().splitlines()
    assert sum(line.startswith(REPRO) for line in told) == len(STAGES) - 1  # promotion is none of DVC's
    assert {line.split()[1] for line in told if line.startswith("tasks")} >= {"doctor:", "promote:", "report:"}
    assert [line for line in told if "refused" in line] == []


def test_stages_are_shown_in_order_with_their_own_lines_and_without_dvcs(finished: tuple[Project, str]):
    _, output = finished
    places = [output.index(f"── {stage}\n") for stage in STAGES]
    assert places == sorted(places)
    assert "train is at work\n" in output
    doctor = output.index("── doctor\n"), output.index("doctor: 0 pass, 1 warn, 0 fail\n")
    assert output.index("── assess\n") < doctor[0] < doctor[1] < output.index("── warm_start\n")
    for chatter in ("Running stage", "lock file", "git add", "dvc push", "Prefect", "INFO"):
        assert chatter not in output


def test_seconds_are_there_for_each_stage_and_in_total(finished: tuple[Project, str]):
    seconds = read_json(finished[0].artifacts / "run.json")["seconds"]
    assert set(seconds) == {*STAGES, "total"}
    assert sum(seconds[stage] for stage in STAGES) < seconds["total"] < WAIT_SECONDS


def test_mlflow_has_a_parent_with_a_child_a_stage(finished: tuple[Project, str]):
    project, _ = finished
    assert parent(project).info.status == "FINISHED"
    record = read_json(project.artifacts / "run.json")
    assert (parent(project).info.run_id, record["mlflow_uri"]) == (
        record["mlflow_run_id"],
        "sqlite:///artifacts/mlflow/mlflow.db",
    )
    assert set(children(project)) == set(STAGES)
    assert {run.info.status for run in children(project).values()} == {"FINISHED"}
    train = children(project)["train"]
    history = project.mlflow().get_metric_history(train.info.run_id, "success_rate")
    assert sorted(item.step for item in history) == list(range(1, 11))  # live and from the file, each once
    champion = project.mlflow().get_model_version_by_alias("travel-desk-agent", "champion")
    assert champion.run_id == parent(project).info.run_id


def test_nothing_listens_nothing_runs_and_nothing_lies_outside_the_folder(finished: tuple[Project, str]):
    project, _ = finished
    assert project.processes() == []
    assert [path for path in project.home.rglob("*") if path.is_file()] == []
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"],
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = (
        " M dvc.yaml",
        " M tasks/__main__.py",
        " M tasks/commands/doctor/doctor.py",
        " M tasks/rollouts/collect.py",
        "?? toy_problems.txt",
        "?? toy_stage.py",
        "dvc.lock",
    )  # what makes it a toy, and what each run rewrites
    assert [line for line in changed.stdout.splitlines() if not line.endswith(ours)] == []


def test_an_unchanged_run_ends_in_seconds_and_says_since_when_nothing_changed(
    finished: tuple[Project, str], monkeypatch: pytest.MonkeyPatch
):
    project, _ = finished
    monkeypatch.setattr(project, "server", {})
    server_log = project.artifacts / ".prefect" / "server.log"
    first, started, before = read_json(project.artifacts / "run.json"), server_log.stat(), child_seconds()
    output = project.flow()
    assert child_seconds() - before < RERUN_SECONDS
    assert server_log.stat() == started  # each start of a server makes a new one
    assert f"nothing changed since run {first['mlflow_run_id'][:8]}" in output
    assert "── curate" not in output
    assert re.search(r"^decision +artifacts/promote/decision.html$", output, re.MULTILINE)
    assert read_json(project.artifacts / "run.json") == first
    assert project.versions() == [1]


def test_a_person_s_reason_starts_a_run_that_repeats_no_stage(finished: tuple[Project, str]):
    project, _ = finished
    first = children(project)
    output = project.flow("--reason", "to see it again")
    assert "a person asked: to see it again\n" in output
    record = read_json(project.artifacts / "run.json")
    assert record["cached"] == {**dict.fromkeys(STAGES, True), "promote": False}
    assert record["champion"]["promoted"] is True
    assert "already champion" in output
    assert "doctor: nothing changed\n" in output
    assert project.versions() == [1]
    assert parent(project).data.tags["reason"] == "a person asked: to see it again"
    for stage, run in children(project).items():
        if stage != "promote":
            assert run.data.tags["source_run_id"] == first[stage].info.run_id


def test_a_rotated_test_set_is_evaluated_on_and_nothing_is_trained_again(finished: tuple[Project, str]):
    project, _ = finished
    project.set_params({"curate.test_rotation": 1})
    assert set(project.changed()) == {"curate"}
    output = project.repro()
    assert [stage for stage in STAGES if f"Running stage '{stage}':" in output] == ["curate", "evaluate"]
    project.set_params({"curate.test_rotation": 0})
    assert "Running stage" not in project.repro()  # DVC has the results of both


def test_a_changed_param_of_train_runs_train_and_evaluate_alone(finished: tuple[Project, str]):
    project, _ = finished
    before = project.snapshot_hashes()
    kept = project.params()["train"]["group_size"]
    project.set_params({"train.group_size": kept + 1})
    output = project.repro()
    assert [stage for stage in STAGES if f"Running stage '{stage}':" in output] == ["train", "evaluate"]
    assert project.snapshot_hashes() != before
    project.set_params({"train.group_size": kept})


def test_a_failed_doctor_or_stage_is_its_own_message_one_line_and_status_1(project: Project, prefect: dict[str, str]):
    project.server = prefect
    turn_knob(project, "fail_doctor")
    result = project.run("flows", "run")
    assert result.returncode == 1
    assert "doctor: 0 pass, 0 warn, 1 fail\n" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: doctor failed, so nothing after it ran; its own message is above")
    assert (project.artifacts / "assess").exists()
    assert not (project.artifacts / "warm_start").exists()
    assert parent(project).info.status == "FAILED"

    release_knobs(project)
    turn_knob(project, "fail_train")
    result = project.run("flows", "run")
    assert result.returncode == 1
    assert "error: train: the toy broke\n" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: train failed, so nothing after it ran")
    assert "Traceback" not in result.stdout + result.stderr
    assert not (project.artifacts / "run.json").exists()
    assert parent(project).info.status == children(project)["train"].info.status == "FAILED"
    assert project.processes() == []


def test_a_typo_in_any_section_stops_the_flow_before_any_work(project: Project):
    params = (project.folder / "params.yaml").read_text(encoding="utf-8")
    (project.folder / "params.yaml").write_text(params.replace("minimum_success", "minimum_sucess"), encoding="utf-8")
    before = child_seconds()
    result = project.run("flows", "run")
    assert child_seconds() - before < 20  # 1 s; Prefect and a first stage take more than that
    assert result.returncode == 1
    assert "promote.minimum_sucess is not a setting" in result.stderr
    assert "Did you mean minimum_success?" in result.stderr
    assert sorted(path.name for path in project.artifacts.iterdir()) == [".prefect", "mlflow"]  # as they were
    assert not (project.artifacts / ".prefect" / "server.log").exists()


def test_a_second_flow_in_the_folder_and_strangers_are_refused_and_the_first_goes_on_until_ctrl_c(project: Project):
    """Whoever may speak to the first one's server could start what they like."""
    project.has_own_forks = True
    turn_knob(project, "hold_assess")
    turn_knob(project, "hold_warm_start")
    first = start_until(project, "assess")
    second = project.run("flows", "run")
    assert second.returncode == 1
    (line,) = second.stderr.splitlines()
    assert f"another run (process {first.pid}: `run`) is at work in this folder" in line
    api = api_of(server_of(first.pid))
    num_runs = api.num_runs()
    assert api.open_paths() <= {"/health", "/ready"}
    assert api.num_runs() == num_runs
    assert api.leaks(project.folder) == []
    assert not (project.artifacts / ".prefect" / PASSWORD_FILE).exists()  # there is no page to log in to
    (project.folder / "knobs" / "hold_assess").unlink()
    wait_for(lambda: is_at_work(project, "warm_start"))
    expect_closed_books(project, first, "warm_start", signal.SIGINT, status=130)


def test_a_flow_that_is_told_to_end_does_so_too(project: Project):
    project.has_own_forks = True
    turn_knob(project, "hold_curate")
    expect_closed_books(project, start_until(project, "curate"), "curate", signal.SIGTERM, status=143)


def expect_closed_books(
    project: Project, flow: subprocess.Popen[str], stage: str, number: signal.Signals, *, status: int
) -> None:
    """A flow that a signal interrupts ends its stage, whose DVC is a fork, and leaves its runs closed."""
    assert REPRO[:15] in {process.name() for process in project.processes()}
    child = int((project.artifacts / f".{stage}.pid").read_text())
    flow.send_signal(number)
    _, errors = flow.communicate(timeout=WAIT_SECONDS)
    assert flow.returncode == status
    assert "Traceback" not in errors
    assert (
        "interrupted" in errors
        if number == signal.SIGINT
        else f"error: the run was told to end ({number.name})" in errors
    )
    assert not psutil.pid_exists(child)
    assert project.processes() == []
    assert parent(project).info.status == "KILLED"


def test_after_kill_9_of_dvc_and_of_the_flow_nothing_is_left_and_the_next_one_finishes_the_work(project: Project):
    """Of DVC alone, which fails the flow; then of the flow, which ends all it started."""
    project.has_own_forks = True
    turn_knob(project, "hold_train")
    flow = start_until(project, "train")
    (dvc,) = [process for process in project.processes() if REPRO in process.cmdline()]
    dvc.kill()
    _, errors = flow.communicate(timeout=WAIT_SECONDS)
    assert flow.returncode == 1
    assert "train was ended by signal 9" in errors
    assert project.processes() == []

    flow = start_until(project, "train")
    os.kill(flow.pid, signal.SIGKILL)
    flow.communicate()
    wait_for(lambda: project.processes() == [])

    release_knobs(project)
    project.flow()
    assert project.versions() == [1]
    assert project.leftovers() == []
    cached = read_json(project.artifacts / "run.json")["cached"]
    assert [stage for stage in STAGES if cached[stage]] == ["curate", "assess", "warm_start"]
    assert [run.info.status for run in runs(project, "tags.kind = 'flow'")] == ["FINISHED", "KILLED", "FAILED"]
    assert prefect_states(project) == ["COMPLETED", "CRASHED", "FAILED"]


def test_in_a_terminal_a_bar_moves_while_its_stage_is_at_work(project: Project, prefect: dict[str, str]):
    project.server = prefect
    turn_knob(project, "bar_curate")
    turn_knob(project, "fail_assess")  # seen enough by then
    reader, writer = pty.openpty()
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows", "run"],
        cwd=project.folder,
        env={**project.environment(), "TERM": "xterm"},
        stdin=writer,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    shown, at_work = b"", project.folder / "knobs" / "bar_curate"
    try:
        while chunk := os.read(reader, 65536):
            shown += chunk
            if b"4/5" in shown:  # drawn while the stage is held, before its last step
                at_work.unlink(missing_ok=True)
    except OSError:  # the last writer of the terminal is gone
        pass
    os.close(reader)
    assert flow.wait(timeout=WAIT_SECONDS) == 1
    assert not at_work.exists()
    assert b"5/5" in shown
    assert b"Updating lock file" not in shown


def test_help_answers_at_once_and_loads_nothing_heavy(project: Project):
    before = child_seconds()
    result = project.run("flows", "--help")
    assert child_seconds() - before < 2  # 0.3 s
    assert "serve" in result.stdout
    code = (
        "import sys, flows.__main__; print([m for m in ('prefect', 'mlflow', 'torch', 'pandas') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=project.folder, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["serve", "--cron", "61 3 * * *"], "--cron '61 3 * * *' is not a cron expression"),
        (["serve", "--cron", "0 3 * * *", "--check-cron", "30"], "--check-cron '30' is not a cron expression"),
        (["run", "--reason", "a" * 1001], "--reason has more than 1,000 characters"),
    ],
)
def test_an_option_nobody_can_use_is_refused_before_a_server_starts(project: Project, command: list[str], told: str):
    result = project.run("flows", *command)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {told}") and result.stderr.count("\n") == 1
    assert not list((project.artifacts / ".prefect").glob("ser*.log"))
    assert project.processes() == []
