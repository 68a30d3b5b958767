"""The drills of vLLM run where what they watch has changed since they passed, and CI asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import drills
from tests.conftest import ROOT


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pytest was asked to run, in a project of one watched file; all of it passes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "engine.py").write_text("1", encoding="utf-8")
    monkeypatch.setattr(drills, "ROOT", tmp_path)
    monkeypatch.setattr(drills, "STAMP", tmp_path / "tests" / "drills_passed.txt")
    monkeypatch.setattr(drills, "WATCHED", ("engine.py",))
    monkeypatch.setattr(drills, "find_spec", lambda name: object())
    asked: list[list[str]] = []

    def pass_all(arguments: list[str]) -> int:
        asked.append(arguments)
        return 0

    monkeypatch.setattr("pytest.main", pass_all)
    return asked


def test_they_run_once_and_again_when_a_watched_file_changes(runs: list[list[str]]) -> None:
    assert [drills.main([]), drills.main([])] == [0, 0]
    assert runs == [["-m", "drill"]]
    (drills.ROOT / "engine.py").write_text("2", encoding="utf-8")
    assert drills.main([]) == 0
    assert len(runs) == 2


def test_a_part_of_them_or_a_failure_is_not_noted(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert drills.main(["-k", "kill"]) == 0
    assert not drills.have_passed()
    monkeypatch.setattr("pytest.main", lambda arguments: 1)
    assert drills.main([]) == 1
    assert not drills.have_passed()


def test_without_vllm_they_do_not_pass(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "find_spec", lambda name: None)
    assert drills.main([]) == 1
    assert runs == []


def test_what_they_watch_is_there_and_ci_runs_every_step() -> None:
    assert all((ROOT / name).exists() for name in drills.WATCHED)
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [step for step in steps if step.startswith("make")] == [
        "make lint",
        "make test",
        "make test-demo",
        "make test-vllm",
    ]
