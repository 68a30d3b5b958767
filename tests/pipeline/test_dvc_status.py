"""For all that profiles watch, real DVC: an edit of code that a run imports names the stages to run again; other edits
name none.

The stages do not run here: `dvc commit` takes made-up results as theirs. That whatever a stage can import is in a
folder it watches is proved without DVC (`tests/contracts/test_dvc_deps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.import_graph import ROOT, closure, python_files
from tasks.core.resume import fill_in
from tests.pipeline.project import Project, make_project
from tests.profiles import NAMES, profile_params, profile_text

pytestmark = pytest.mark.flow
GRAPH: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
ARTIFACTS = "artifacts/"
UNWATCHED = {Path("README.md"), Path("tasks/custom/README.md"), Path("tasks/commands/profile.py")}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("status") / "project")


def watched_code(params: dict[str, Any]) -> dict[str, list[str]]:
    """The files and folders of code that each stage watches."""
    return {
        stage: sorted(dep for item in content["deps"] if (dep := fill_in(item, params)).startswith("tasks/"))
        for stage, content in GRAPH.items()
    }


def unlike_profiles() -> list[str]:
    """Of those that watch the same code, the first."""
    first: dict[str, str] = {}
    for name in NAMES:
        first.setdefault(str(watched_code(profile_params(name))), name)
    return [*first.values()]


def take_results_as_made(project: Project, params: dict[str, Any]) -> None:
    """Give every stage the files that it reads and leaves, and have DVC record them as its own."""
    for stage in GRAPH.values():
        for name in (fill_in(item, params) for item in (*stage["deps"], *stage["outs"])):
            path = project.folder / name
            if not path.exists() and "." in path.name:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("{}\n", encoding="utf-8")
            elif not path.exists():
                path.mkdir(parents=True)
                (path / "made").write_text("made\n", encoding="utf-8")
    done = project.run("dvc", "commit", "--force")
    assert done.returncode == 0, done.stderr


@contextmanager
def edited(project: Project, files: set[Path]) -> Iterator[None]:
    before = {file: (project.folder / file).read_bytes() for file in files}
    for file, content in before.items():
        (project.folder / file).write_bytes(content + b"\n")
    try:
        yield
    finally:
        for file, content in before.items():
            (project.folder / file).write_bytes(content)


def files_of_others(params: dict[str, Any]) -> set[Path]:
    """One file in the folder of every environment and engine that this run does not use."""
    used = {params["environment"]["name"], params["engine"]["name"], "endpoint", "__pycache__"}
    folders = [folder for room in ("environments", "engines") for folder in (ROOT / "tasks" / room).iterdir()]
    return {python_files(folder)[0] for folder in folders if folder.is_dir() and folder.name not in used}


@pytest.mark.parametrize("name", unlike_profiles())
def test_dvc_status_names_what_an_edit_makes_stale(project: Project, name: str):
    params = profile_params(name)
    (project.folder / "params.yaml").write_text(profile_text(name), encoding="utf-8")
    take_results_as_made(project, params)
    compiled = project.folder / "tasks" / "core" / "__pycache__"
    compiled.mkdir(exist_ok=True)
    (compiled / f"{name}.cpython-311.pyc").write_bytes(b"compiled")
    with edited(project, files_of_others(params) | UNWATCHED):
        assert project.changed() == {}

    watched = watched_code(params)
    edits = {last_file(dep) for dep in set().union(*watched.values()) if any((ROOT / dep).glob("**/*.py"))}
    with edited(project, edits):
        status = project.changed()
    for stage, deps in watched.items():
        named = {dep for entry in status[stage] for dep in dict(entry).get("changed deps", {})}
        assert named == {dep for dep in deps if any(file.is_relative_to(dep) for file in edits)}


def last_file(dep: str) -> Path:
    """A file of a folder that DVC watches, as deep in it as any."""
    return max(python_files(Path(dep)), key=lambda file: len(file.parts))


def test_an_edit_for_one_agent_makes_nothing_of_another_stale(project: Project):
    """Each has a folder in tasks/custom, which its paths.custom names."""
    custom = project.folder / "tasks" / "custom"
    for agent in ("desk", "shop"):
        (custom / agent).mkdir()
        (custom / agent / "rewards.py").write_text("WEIGHT = 1\n", encoding="utf-8")
    params = profile_params("demo")
    params["paths"]["custom"] = "tasks/custom/desk"
    (project.folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    take_results_as_made(project, params)
    with edited(project, {Path("tasks/custom/shop/rewards.py")}):
        assert project.changed() == {}
    with edited(project, {Path("tasks/custom/desk/rewards.py")}):
        assert "curate" in project.changed() and "evaluate" in project.changed()


def test_an_edit_of_an_imported_file_is_named_by_its_stage(project: Project):
    """The folder of a stage is watched by that stage alone."""
    (project.folder / "params.yaml").write_text(profile_text("demo"), encoding="utf-8")
    take_results_as_made(project, profile_params("demo"))
    run = Path("tasks/stages/train/run.py")
    assert run in closure([Path("tasks/stages/train/stage.py")])
    with edited(project, {run}):
        assert list(project.changed()) == ["train"]
