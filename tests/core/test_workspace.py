"""Entering a workspace: the right folder, or one line before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tasks.commands.workspace import new
from tasks.core.settings import read_params
from tasks.core.workspace import CODE, LINKED, VARIABLE, enter_workspace, folder_of_code
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


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
