"""What people get wrong about models and disks, through the command line: one clear message, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.pipeline import order as stages
from tests import tiny
from tests.pipeline.project import Project, make_project
from tests.readme import page_block

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose first stage is done."""
    project = make_project(tmp_path_factory.mktemp("bad") / "project")
    done = project.run("tasks", "curate")
    assert done.returncode == 0, done.stderr
    return project


def refused(project: Project, *arguments: str, **settings: Any) -> str:
    """The one message a command ends with under these settings, which are put back afterwards."""
    before = (project.folder / "params.yaml").read_text()
    project.set_params({name.replace("__", "."): value for name, value in settings.items()})
    try:
        result = project.run(*arguments)
    finally:
        (project.folder / "params.yaml").write_text(before)
    assert result.returncode not in (0, None), result.stdout
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    assert project.leftovers() == []
    assert result.stderr.count("error:") == 1, result.stderr
    return result.stderr[result.stderr.index("error:") :]


def refused_in_here(project: Project, monkeypatch: pytest.MonkeyPatch, model: Path, **settings: Any) -> str:
    """The error `assess` ends with over a model: the same without a process of its own, which imports for 4 s."""
    before = (project.folder / "params.yaml").read_text()
    own = {name.replace("__", "."): value for name, value in settings.items()}
    project.set_params({"model.path": str(model), **own})
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(stages, "prepare_process", lambda params: None)
    try:
        with pytest.raises(ValueError) as error:
            stages.run_stage("assess")
    finally:
        (project.folder / "params.yaml").write_text(before)
    assert "\n" not in str(error.value)
    assert project.leftovers() == []
    assert not (project.artifacts / "assess").exists()
    return str(error.value)


def test_a_model_folder_that_is_not_there_stops_the_flow_before_any_work(curated: Project) -> None:
    message = refused(curated, "flows", "run", model__path="no/such/model")
    assert "model.path = 'no/such/model' does not exist" in message
    assert "Correct the path" in message


def test_a_misspelt_world_stops_the_flow_before_any_work(curated: Project) -> None:
    message = refused(curated, "flows", "run", environment__name="traveldesk")
    assert "environment.name" in message and "'traveldesk'" in message
    assert "travel_desk" in message


def test_a_data_file_that_is_not_there_stops_the_flow_before_any_work(curated: Project) -> None:
    assert "curate.source = 'mine.jsonl' does not exist" in refused(
        curated, "flows", "run", curate__source="mine.jsonl"
    )


def test_a_hub_name_gets_the_command_that_fetches_it_at_every_door(
    curated: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "`.venv/bin/hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`"
    lora = {"rank": 8, "alpha": 16, "target_modules": "all-linear"}
    small = {"train__lora": lora, "assess__warm_start_below": 0.0}  # in full it would not fit a small machine
    assert command in refused_in_here(curated, monkeypatch, Path("Qwen/Qwen3-0.6B"), **small)
    assert command in refused(curated, "flows", "run", model__path="Qwen/Qwen3-0.6B", **small)


def test_a_folder_without_a_model_says_what_a_model_folder_is(
    curated: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is not a folder with a config.json" in refused_in_here(curated, monkeypatch, tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(
    curated: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    message = refused_in_here(curated, monkeypatch, folder)
    assert "has no chat template" in message
    assert "instruction-tuned" in message


def test_a_model_without_safetensors_is_refused(
    curated: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "contains no *.safetensors file" in refused_in_here(curated, monkeypatch, folder)


def test_episodes_longer_than_the_models_context_are_refused(curated: Project, tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    message = refused(curated, "tasks", "assess", model__path=str(folder), sampling__max_tokens_per_episode=9999)
    assert "the model's context is 256 tokens" in message


@pytest.mark.parametrize(
    ("database", "told"),
    [
        (".prefect/prefect.db", "artifacts/.prefect/damaged-1"),
        ("mlflow/mlflow.db", "mv artifacts/mlflow/mlflow.db*"),
    ],
)
def test_a_damaged_database_stops_the_flow_before_any_work(curated: Project, database: str, told: str) -> None:
    file = curated.artifacts / database
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"garbage" * 1000)
    message = refused(curated, "flows", "run")
    assert told in message
    assert "file is not a database" in message and message.count("\n") == 1
    file.unlink()


FULL_DISK = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sys.argv = ["tasks", "assess"]
runpy.run_module("tasks", run_name="__main__")
"""


def test_a_disk_that_fills_up_leaves_nothing_half_written(curated: Project, tmp_path: Path) -> None:
    """No file may pass 50 kB, as on a full disk every write fails: the model's weights are the first that do."""
    environment = {**curated.environment(), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK], cwd=curated.folder, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert not (curated.artifacts / "assess").exists()
    assert curated.leftovers() == []


def test_the_pages_problem_and_trajectory_are_complete_rows() -> None:
    from tasks.core.records import Problem, Trajectory
    from tasks.environments.travel_desk.environment import TravelDesk

    page = "tasks/environments/README.md"
    problem = Problem.model_validate_json(page_block(page, "json", "td-7-"))
    episode = TravelDesk().start(problem)
    for call in problem.reference[0].calls:
        episode.call(call.name, call.arguments)
    assert episode.verdict(problem.reference[0].answer).success
    shortened = json.loads(page_block(page, "text").replace(", …", ""))
    assert Trajectory.from_row(shortened).is_success
