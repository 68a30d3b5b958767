"""Entering a workspace: the right folder, or one line before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.workspace import new
from tasks.core.console import SafeConsole
from tasks.core.settings import Paths, read_params
from tasks.core.workspace import CODE, ENTERED, LINKED, VARIABLE, as_shell_sees, enter_workspace, folder_of_code
from tasks.pipeline.run_lock import AnotherRun, only_run
from tasks.report.summary import print_places
from tasks.stages.promote.record import print_decision
from tests.conftest import ROOT
from tests.measurement.decisions import ROWS

WITH_CODE = {**os.environ, "PYTHONPATH": str(ROOT)}
HOLD = """
import sys
from pathlib import Path
from typing import Any
from tasks.pipeline.run_lock import only_run
with only_run(Path("artifacts")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for name in (VARIABLE, ENTERED):
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)


def test_a_new_workspace_is_entered_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = list(new(Path("shop"), ["test"], "shop 2"))
    assert told[0] == "params.yaml is now the profile test with model shop 2" and "--workspace" in told[-1]
    monkeypatch.setenv(VARIABLE, "shop")
    enter_workspace(None)
    assert Path.cwd() == tmp_path / "shop" and os.environ["PWD"] == str(tmp_path / "shop")
    assert VARIABLE not in os.environ  # a child's folder may be another
    params = read_params()
    assert (params["promote"]["model_name"], params["tracking"]["experiment"]) == ("shop 2", "shop 2")
    assert {name: Path(name).resolve() for name in LINKED} == {name: CODE / name for name in LINKED}


def test_the_commit_on_record_is_that_of_the_linked_code(tmp_path: Path):
    assert folder_of_code() == tmp_path
    list(new(Path("shop"), ["test"], None))
    enter_workspace(Path("shop"))
    assert folder_of_code() == CODE


def test_a_second_new_renews_the_links_and_keeps_what_is_the_agents(tmp_path: Path):
    list(new(Path("shop"), ["test"], "shop"))
    mine = {"params.yaml": "# mine\n", ".dvc/config": "[core]\n    remote = store\n", "artifacts/result": "x"}
    for name, text in mine.items():
        (tmp_path / "shop" / name).write_text(text, encoding="utf-8")
    (tmp_path / "shop/tasks").unlink()
    (tmp_path / "shop/tasks").symlink_to(tmp_path)
    former = "stages: {}  # python -m tasks\n"  # what a link from when the code was elsewhere leads to
    (tmp_path / "old.yaml").write_text(former, encoding="utf-8")
    (tmp_path / "shop/dvc.yaml").unlink()
    (tmp_path / "shop/dvc.yaml").symlink_to(tmp_path / "old.yaml")
    list(new(Path("shop"), [], None))
    assert (tmp_path / "old.yaml").read_text(encoding="utf-8") == former
    assert (tmp_path / "shop/dvc.yaml").read_bytes() == (CODE / "dvc.yaml").read_bytes()
    assert {name: (tmp_path / "shop" / name).read_text(encoding="utf-8") for name in mine} == mine
    assert (tmp_path / "shop/tasks").resolve() == CODE / "tasks"


@pytest.mark.parametrize(
    ("place", "why"), [(CODE / "agents", "inside the code"), (Path("file"), "is a file"), (Path("own"), "of its own")]
)
def test_a_place_that_cannot_be_one_is_refused_and_left_alone(tmp_path: Path, place: Path, why: str):
    (tmp_path / "file").touch()
    (tmp_path / "own" / "tasks").mkdir(parents=True)
    with pytest.raises(ValueError, match=why):
        list(new(place, ["test"], None))
    assert not (CODE / "agents").exists() and [item.name for item in (tmp_path / "own").iterdir()] == ["tasks"]


def test_a_folder_with_another_pipeline_is_refused_and_its_graph_stays(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dvc.yaml").write_text("stages: {fit: {cmd: python fit.py}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dvc\.yaml: exists and is not"):
        list(new(Path("other"), ["test"], None))
    assert [item.name for item in (tmp_path / "other").iterdir()] == ["dvc.yaml"]
    assert "fit.py" in (tmp_path / "other" / "dvc.yaml").read_text(encoding="utf-8")
    (tmp_path / "folders" / "dvc.yaml").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"dvc\.yaml: exists and is not"):
        list(new(Path("folders"), ["test"], None))


def test_a_profile_that_is_none_makes_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match="not a profile"):
        list(new(Path("shop"), ["no-such"], None))
    assert not (tmp_path / "shop").exists()


def test_a_folder_that_is_no_workspace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=r"no workspace.*workspace new"):
        enter_workspace(None)


def test_a_workspace_of_another_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`tasks` of a folder is imported by its stages, so a command and its stages would run two versions."""
    for name in (".dvc", "other"):
        (tmp_path / name).mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "tasks").symlink_to(tmp_path / "other")
    monkeypatch.setenv("PWD", str(tmp_path))
    with pytest.raises(ValueError, match="works with the code of"):
        enter_workspace(tmp_path)


def test_a_stage_that_dvc_starts_stays_in_the_folder_of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`dvc exp run --temp` works in a copy; the variable of the person who started it names the original."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "/somewhere")
    monkeypatch.setenv("DVC_STAGE", "train")
    enter_workspace(None)
    assert Path.cwd() == tmp_path and VARIABLE not in os.environ


def test_every_folder_of_code_that_the_graph_names_is_linked():
    graph = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    folders = {dep.partition("/")[0] for stage in graph["stages"].values() for dep in stage["deps"] if "$" not in dep}
    assert folders and folders <= set(LINKED)


def test_places_are_printed_as_the_shell_and_the_next_command_find_them_also_by_a_child(tmp_path: Path):
    """A path after --workspace is relative to the workspace, and one in the shell to the shell's folder."""
    place = Path("artifacts/report/index.html")
    assert as_shell_sees(place) == "artifacts/report/index.html"  # without a workspace as it is
    list(new(Path("shop"), ["test"], None))
    enter_workspace(tmp_path / "shop")
    assert as_shell_sees(place) == str(tmp_path / "shop" / place)
    enter_workspace(None)  # as a child does, which the variable tells the same
    assert as_shell_sees(place) == str(tmp_path / "shop" / place)


def test_a_workspace_whose_params_are_of_an_earlier_version_says_so_when_it_is_renewed(tmp_path: Path):
    list(new(Path("shop"), ["test"], None))
    params = tmp_path / "shop/params.yaml"
    params.write_text(params.read_text().replace("  custom: tasks/custom ", "  #"))
    told = list(new(Path("shop"), [], None))
    assert "has to be corrected before a stage can run: params.yaml: paths.custom is missing" in told[0]


def test_what_a_command_prints_of_a_workspace_is_found_from_its_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The pages, MLflow's database, the folder's lock and the decision; the other folder has a report too."""
    list(new(Path("shop"), ["test"], None))
    (tmp_path / "code/artifacts/report").mkdir(parents=True)
    (tmp_path / "code/artifacts/report/index.html").write_text("another agent's", encoding="utf-8")
    for file in ("report/index.html", "promote/decision.html", "mlflow/mlflow.db"):
        (tmp_path / "shop/artifacts" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shop/artifacts" / file).touch()
    os.chdir(tmp_path / "code")
    enter_workspace(Path("../shop"))
    print_places(Paths("artifacts"), SafeConsole())
    print_decision(ROWS["promote"], Path("artifacts/promote/decision.html"), SafeConsole())
    told = capsys.readouterr().out
    shop = tmp_path / "shop"
    assert f"{shop}/artifacts/report/index.html" in told and f"sqlite:///{shop}/artifacts/mlflow/mlflow.db" in told
    assert told.rstrip().endswith(f": {shop}/artifacts/promote/decision.html")
    assert not [word for word in told.split() if word.startswith("artifacts/")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owner = subprocess.Popen([sys.executable, "-c", HOLD], env=WITH_CODE, **pipes)
    assert owner.stdout is not None and owner.stdout.readline()
    with pytest.raises(AnotherRun, match=f"^{shop}/artifacts: another run"), only_run(Path("artifacts")):
        pass
    owner.kill()
    owner.communicate()
