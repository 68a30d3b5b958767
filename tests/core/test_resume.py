"""What is left of a killed run once the stage has its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.resume import clear_resume, resume_folder, resume_root
from tasks.core.settings import Paths, Settings


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


def test_code_that_changed_is_another_run_and_compiled_code_or_a_page_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("environment: {name: shop}\n")
    (tmp_path / "dvc.yaml").write_text("stages: {train: {deps: ['tasks/${environment.name}']}}\n")
    (compiled := tmp_path / "tasks" / "shop" / "__pycache__").mkdir(parents=True)
    code = tmp_path / "tasks" / "shop" / "environment.py"
    code.write_text("1")

    def folder() -> Path:
        return resume_folder("train", Settings(), Paths("artifacts"))

    before = folder()
    (compiled / "environment.cpython-311.pyc").write_bytes(b"1")
    (tmp_path / "tasks" / "shop" / "README.md").write_text("What a shop is.")
    assert folder() == before
    code.write_text("2")
    assert folder() != before
