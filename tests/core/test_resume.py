"""What is left of a killed run once the stage has its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.resume import clear_resume, resume_folder, resume_root
from tasks.core.settings import Paths, Settings, load
from tasks.stages.train.settings import TrainSections
from tests.profiles import profile_params


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Two killed runs of train with a checkpoint and kept rows each; the second has one that was refused, too."""
    paths = Paths(tmp_path)
    for run in ("first", "second"):
        (resume_root("train", paths) / run / "iteration-0005").mkdir(parents=True)
        (resume_root("train", paths) / run / "rows.jsonl").write_text("{}\n")
    (resume_root("train", paths) / "second" / "refused" / "iteration-0010").mkdir(parents=True)
    return paths


def test_a_finished_stage_leaves_nothing_to_go_on_with_but_what_was_refused(paths: Paths) -> None:
    clear_resume("train", paths)
    left = sorted(str(item.relative_to(resume_root("train", paths))) for item in resume_root("train", paths).rglob("*"))
    assert left == ["second", "second/refused", "second/refused/iteration-0010"]


def test_a_stage_that_was_never_killed_has_nothing_to_clear(paths: Paths) -> None:
    clear_resume("evaluate", paths)
    assert not resume_root("evaluate", paths).exists()


class OfOthers(Settings):
    """The sections of a stage that also plays in another environment, which dvc.yaml does not name."""

    def unwatched_folders(self) -> list[str]:
        return ["tasks/desk"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("environment: {name: shop}\n")
    (tmp_path / "dvc.yaml").write_text("stages: {train: {deps: ['tasks/${environment.name}']}}\n")
    return tmp_path


def test_code_of_an_environment_that_dvc_does_not_watch_is_another_run_where_it_is_played(project: Path) -> None:
    for name in ("shop", "desk"):
        (project / "tasks" / name).mkdir(parents=True)
        (project / "tasks" / name / "environment.py").write_text("1")

    def folders() -> list[Path]:
        return [resume_folder("train", settings, Paths("artifacts")) for settings in (Settings(), OfOthers())]

    own, also = folders()
    (project / "tasks" / "desk" / "environment.py").write_text("2")
    assert folders()[0] == own
    assert folders()[1] != also


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"max_length_growth": 3.5, "max_kl": None, "max_rollbacks": 7, "low_success": 0.9}, True),
        ({"action": "roll_back"}, False),
        ({"step_factor": 0.25}, False),
        ({"window": 80}, False),
    ],
    ids=str,
)
def test_a_run_goes_on_under_other_limits_of_the_sentinel_and_no_other_action(
    project: Path, changed: dict[str, Any], is_same: bool
) -> None:
    (project / "tasks" / "shop").mkdir(parents=True)
    params = profile_params("test")
    assert params["sentinel"]["action"] == "stop"
    others = {**params, "sentinel": params["sentinel"] | changed}
    found = {resume_folder("train", load(TrainSections, given), Paths("artifacts")) for given in (params, others)}
    assert len(found) == (1 if is_same else 2)


def test_code_that_changed_is_another_run_and_compiled_code_or_a_page_is_not(project: Path) -> None:
    (compiled := project / "tasks" / "shop" / "__pycache__").mkdir(parents=True)
    code = project / "tasks" / "shop" / "environment.py"
    code.write_text("1")

    def folder() -> Path:
        return resume_folder("train", Settings(), Paths("artifacts"))

    before = folder()
    (compiled / "environment.cpython-311.pyc").write_bytes(b"1")
    (project / "tasks" / "shop" / "README.md").write_text("What a shop is.")
    assert folder() == before
    code.write_text("2")
    assert folder() != before
