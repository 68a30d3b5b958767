"""What is left of a killed run once the stage has its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.resume import clear_resume, resume_root
from tasks.core.settings import Paths


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
