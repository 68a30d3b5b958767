"""`python -m tasks` as a person meets it: quick, and every mistake is one clear message with a status that is not 0."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tasks.commands.cli.stages import is_known_to_dvc
from tasks.core.stages import STAGES
from tasks.pipeline.run_lock import only_run
from tests.conftest import ROOT
from tests.profiles import profile_text

HEAVY = {
    "torch",
    "transformers",
    "mlflow",
    "prefect",
    "great_expectations",
    "numpy",
    "pandas",
    "scipy",
    "rich",
    "pydantic",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml (the test profile), the profiles and the graph, as the working directory."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    shutil.copytree(ROOT / "infra" / "profiles", tmp_path / "infra" / "profiles")
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tasks(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python -m tasks …` in the working directory."""
    command = [sys.executable, *options, "-m", "tasks", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that ended as it should: status 1, one message, no traceback."""
    assert result.returncode == 1, result
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    return result.stderr.removeprefix("error: ").strip()


def cpu_seconds(*arguments: str) -> float:
    """Processor time of a Python, which is all it takes on a machine that does nothing else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_help_answers_in_a_blink():
    """In about twice the time in which typer alone is imported (0.08 s); one of the heavy libraries makes it ten."""
    rounds = [(cpu_seconds("-m", "tasks", "--help"), cpu_seconds("-c", "import typer")) for _ in range(5)]
    ours, typers = map(min, zip(*rounds, strict=True))
    assert ours < 4 * typers, rounds


@pytest.mark.slow
def test_help_loads_no_heavy_library():
    result = tasks("--help", options=("-X", "importtime"))
    loaded = {line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in loaded  # the listing works
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_h_is_help_too():
    assert tasks("lineage", "-h").stdout == tasks("lineage", "--help").stdout


def test_help_lists_the_stages_in_the_order_they_run():
    listed = re.findall(r"^  ([\w-]+) ", tasks("--help").stdout.split("Commands:")[1], flags=re.MULTILINE)
    verbs = [
        "rollback",
        "prune",
        "lineage",
        "fetch",
        "serve",
        "doctor",
        "plan",
        "profile",
        "judge-check",
        "drift-check",
        "report",
        "ablate",
    ]
    verbs += [
        "score",
        "rescore",
        "export",
        "evaluate-snapshot",
        "harvest",
        "backup",
        "restore",
        "cache",
        "registry",
        "workspace",
    ]
    assert listed == [*STAGES, *verbs]


@pytest.mark.slow
def test_a_misspelt_key_is_named_with_the_nearest_names_and_nothing_is_written(project: Path):
    edit(project / "params.yaml", "num_iterations:", "num_iteration:")

    message = refused(tasks("curate"))

    assert "train.num_iteration is not a setting" in message
    assert "Did you mean num_iterations" in message
    assert not (project / "artifacts").exists()


@pytest.mark.slow
def test_all_mistakes_are_told_at_once_whichever_stage_is_asked_for(project: Path):
    edit(project / "params.yaml", "group_size: 8", "group_size: 1")
    edit(project / "params.yaml", "minimum_success: 0.0", "minimum_success: high")

    lines = refused(tasks("curate")).splitlines()

    assert len(lines) == 2
    assert lines[0].startswith("params.yaml: train: group_size is 1 with advantage: std")
    assert lines[1].startswith("params.yaml: promote.minimum_success = 'high'")


@pytest.mark.slow
def test_an_unknown_section_is_refused(project: Path):
    edit(project / "params.yaml", "\ntrain:", "\ntrian:")
    assert "'trian' is not a section turnwise reads" in refused(tasks("train"))


@pytest.mark.slow
def test_a_file_that_is_not_yaml_is_one_message(project: Path):
    (project / "params.yaml").write_text("train: [1, 2\n", encoding="utf-8")
    message = refused(tasks("train"))
    assert "params.yaml: not valid YAML" in message
    assert "\n" not in message


@pytest.mark.slow
def test_outside_the_project_the_remedy_is_to_go_there(project: Path):
    (project / "params.yaml").unlink()
    assert "Run from the project's root" in refused(tasks("evaluate"))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "maker"), [("warm_start", "assess"), ("evaluate", "train"), ("promote", "evaluate")])
def test_a_stage_run_before_its_inputs_exist_names_the_stage_that_makes_them(project: Path, stage: str, maker: str):
    message = refused(tasks(stage))

    assert f"Run `dvc repro` first, which uses its cache, or `python -m tasks {maker}` alone" in message
    assert not (project / "artifacts" / stage).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lineage", "travel"), "'travel' does not name a model version"),
        (("fetch", "models:/travel@champion", "infra"), "infra: is not an empty folder"),
    ],
)
def test_what_needs_no_registry_is_refused_without_one(project: Path, arguments: tuple[str, ...], message: str):
    assert refused(tasks(*arguments)).startswith(message)
    assert not (project / "artifacts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["tasks", "flows"])
def test_a_python_without_the_packages_is_told_to_activate_the_environment(door: str):
    """-S leaves out site-packages, as the machine's own Python does; -E what PYTHONPATH may add."""
    command = [sys.executable, "-S", "-E", "-m", door, "--help"]
    message = refused(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300))
    assert "has no package typer" in message
    assert "`source .venv/bin/activate`" in message and "\n" not in message


@pytest.mark.slow
def test_debug_shows_the_traceback(project: Path):
    result = tasks("evaluate", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused_with_the_number_of_the_first(project: Path):
    with only_run(Path("artifacts")):
        message = refused(tasks("curate"))

    assert f"another run (process {os.getpid()}) is at work in this folder" in message
    assert not (project / "artifacts" / "curate").exists()


@pytest.mark.slow
def test_a_stage_says_where_its_results_are_and_clears_what_a_killed_run_left(project: Path):
    leftover = project / "artifacts" / ".curate.123.partial"
    leftover.mkdir(parents=True)
    edit(project / "params.yaml", "max_select_problems: 60", "max_select_problems: 6")

    result = tasks("curate")

    assert result.returncode == 0, result.stderr
    assert "curate: results are in artifacts/curate (card.html, card.json, " in result.stdout
    assert "`dvc commit -f curate`" in result.stdout
    assert "warning: select has 6 problems" in result.stderr  # of the outlook
    assert not leftover.exists()


def test_dvc_knows_what_it_started_and_nothing_made_by_hand(project: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("DVC_STAGE", "TURNWISE_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    assert not is_known_to_dvc("train", os.environ)
    assert is_known_to_dvc("promote", os.environ)  # no stage of dvc.yaml
    with monkeypatch.context() as patch:
        patch.setenv("DVC_STAGE", "train")
        assert is_known_to_dvc("train", os.environ)

    edit(project / "params.yaml", "launcher: local ", "launcher: external ")
    edit(project / "params.yaml", "num_trainers: 1 ", "num_trainers: 2 ")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert is_known_to_dvc("train", os.environ)  # what started this rank may be DVC's, on another node
    monkeypatch.setenv("TURNWISE_LAUNCH", "srun --ntasks 2")
    assert not is_known_to_dvc("train", os.environ)
    (project / "dvc.yaml").unlink()
    assert is_known_to_dvc("train", os.environ)


@pytest.mark.slow
def test_a_profile_replaces_params_yaml_comments_and_all_and_shows_the_difference(project: Path):
    edit(project / "params.yaml", "num_iterations: 16 ", "num_iterations: 9 ")

    result = tasks("profile", "test")

    assert result.stdout.splitlines() == [
        "params.yaml is now the profile test",
        "  train.num_iterations: 9 → 16",
    ]
    assert (project / "params.yaml").read_text(encoding="utf-8") == profile_text("test")


@pytest.mark.slow
@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_status_1_in_words_and_as_json(project: Path):
    for gpu, does_fit in (("4090-24gb", False), ("a100-80gb", True)):
        wanted = ("plan", "--profile", "my_model", "--model", "Qwen2.5-7B", "--gpu", gpu)
        told, row = tasks(*wanted), tasks(*wanted, "--json")
        assert told.returncode == row.returncode == (0 if does_fit else 1)
        assert json.loads(row.stdout)["fits"] is does_fit
        assert told.stdout.startswith("fits: " if does_fit else "does not fit: ")


def test_a_profile_that_does_not_exist_is_refused_with_those_that_do(project: Path):
    message = refused(tasks("profile", "../secrets"))
    assert "'../secrets' is not a profile" in message
    assert "test" in message


@pytest.mark.slow
def test_a_profile_with_a_mistake_leaves_params_yaml_as_it_was(project: Path):
    before = (project / "params.yaml").read_bytes()
    edit(project / "infra" / "profiles" / "test.yaml", "snapshot_interval: 8", "snapshot_interval: none")

    assert "infra/profiles/test.yaml: train.snapshot_interval" in refused(tasks("profile", "test"))
    assert (project / "params.yaml").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--force",), "--force needs a reason"),
        (("--approve", "--reason", "  "), "--approve needs a reason"),
        (("--force", "--approve", "--reason", "x"), "--force and --approve were given together"),
        (("--reason", "x"), "without an action that needs one"),
        (("--force", "--reason", "x" * 1001), "--reason has 1,001 characters"),
    ],
)
def test_an_order_that_is_not_whole_is_refused_in_one_line(project: Path, options: tuple[str, ...], said: str):
    message = refused(tasks("promote", *options))
    assert said in message
    assert "\n" not in message
