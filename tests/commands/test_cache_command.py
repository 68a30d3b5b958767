"""`python -m tasks cache freeze`: what was recorded becomes one file, the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.commands.freeze_cache import freeze
from tasks.core.records import Problem
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.cache.environment import CachedEnvironment
from tasks.tools.cache.store import read_frozen
from tests import tiny
from tests.conftest import ROOT
from tests.profiles import profile_text
from tests.worlds import environment_settings

PARAMS = profile_text("test")
STORE, PLACEHOLDER = "artifacts/.tool_cache", "tasks/tools/cache/environment.py"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml (the test profile) as the working directory."""
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(problem: Problem) -> None:
    """The problem's reference solution, recorded in the store of params.yaml."""
    cache = {"mode": "record", "folder": STORE, "frozen": PLACEHOLDER}
    environment = CachedEnvironment(environment_settings(cache=cache), world_class=TravelDesk, make=TravelDesk)
    episode = environment.start(problem)
    for call in problem.reference[0].calls:
        episode.call(call.name, call.arguments)
    episode.verdict(problem.reference[0].answer)
    environment.close()


def name_frozen(project: Path, file: str) -> None:
    (project / "params.yaml").write_text(PARAMS.replace(f"frozen: {PLACEHOLDER}", f"frozen: {file}"), encoding="utf-8")


def test_the_command_says_what_it_wrote_and_what_to_do_with_it(project: Path):
    record(tiny.problems(2)[1])  # a quote: four calls
    command = [sys.executable, "-m", "tasks", "cache", "freeze", "data/calls.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert result.stdout.splitlines() == [
        "data/calls.jsonl: 6 entries (replies 4, verdicts 1, environments 1)",
        "  dvc add data/calls.jsonl  versions it",
        "  environment.cache.mode: strict and environment.cache.frozen: data/calls.jsonl  replay it with the tools "
        "switched off",
    ], result.stderr
    assert len(read_frozen(Path("data/calls.jsonl"))) == 6


def test_freezing_twice_writes_the_same_bytes(project: Path):
    record(tiny.problems(1)[0])
    freeze(Path("a.jsonl")), freeze(Path("b.jsonl"))
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()


def test_freezing_again_adds_to_the_file_that_params_name(project: Path):
    """What was frozen before need not be in the store any more."""
    record(tiny.problems(1)[0])
    freeze(Path("calls.jsonl"))
    for file in Path(STORE).iterdir():
        file.unlink()
    record(tiny.problems(2)[1])
    name_frozen(project, "calls.jsonl")

    assert freeze(None)[0] == "calls.jsonl: 8 entries (replies 5, verdicts 2, environments 1)"


def test_without_a_name_the_file_is_tool_cache_jsonl(project: Path):
    record(tiny.problems(1)[0])
    assert freeze(None)[0].startswith("tool_cache.jsonl: 3 entries")


def test_with_nothing_recorded_there_is_nothing_to_freeze(project: Path):
    with pytest.raises(ValueError, match=r"artifacts/\.tool_cache: nothing has been recorded.*mode: record first"):
        freeze(Path("calls.jsonl"))
    assert sorted(item.name for item in project.iterdir()) == ["params.yaml"]
