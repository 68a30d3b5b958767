"""`python -m tasks cache freeze`: what was recorded becomes one file, the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.commands.freeze_cache import freeze
from tasks.core.files import write_jsonl
from tasks.core.records import Problem
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.cache.environment import CachedEnvironment
from tasks.tools.cache.store import read_frozen
from tests import tiny
from tests.conftest import ROOT
from tests.profiles import profile_text
from tests.worlds import QUICK, cache_settings

PARAMS = profile_text("test")
STORE = "artifacts/.tool_cache"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml (the test profile) as the working directory."""
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(problem: Problem) -> None:
    """The problem's reference solution, recorded in the store of params.yaml."""
    cache = cache_settings("record", Path(STORE))
    environment = CachedEnvironment("travel_desk", TravelDesk, TravelDesk, settings=None, limits=QUICK, cache=cache)
    episode = environment.start(problem)
    for call in problem.reference[0].calls:
        episode.call(call.name, call.arguments)
    episode.verdict(problem.reference[0].answer)
    environment.close()


def name_frozen(project: Path, file: str) -> None:
    (project / "params.yaml").write_text(PARAMS.replace("frozen: null", f"frozen: {file}"), encoding="utf-8")


@pytest.mark.slow
def test_the_command_says_what_it_wrote_and_what_to_do_with_it(project: Path):
    record(tiny.problems(2)[1])  # a quote: four calls
    command = [sys.executable, "-m", "tasks", "cache", "freeze", "tasks/custom/calls.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    wrote, dvc, s3, replay = result.stdout.splitlines()
    assert "s3://BUCKET/calls.jsonl#sha256=" in s3
    assert [wrote, dvc, replay] == [
        "tasks/custom/calls.jsonl: 6 entries (replies 4, verdicts 1, environments 1)",
        "  dvc add tasks/custom/calls.jsonl  versions it",
        "  environment.cache.mode: strict and environment.cache.frozen: tasks/custom/calls.jsonl  replay it with the "
        "tools switched off",
    ], result.stderr
    assert len(read_frozen(Path("tasks/custom/calls.jsonl"))) == 6


def test_freezing_twice_writes_the_same_bytes(project: Path):
    record(tiny.problems(1)[0])
    freeze(Path("tasks/custom/a.jsonl")), freeze(Path("tasks/custom/b.jsonl"))
    assert Path("tasks/custom/a.jsonl").read_bytes() == Path("tasks/custom/b.jsonl").read_bytes()


def test_freezing_again_adds_to_the_file_that_params_name(project: Path):
    """What was frozen before need not be in the store any more."""
    record(tiny.problems(1)[0])
    freeze(Path("tasks/custom/calls.jsonl"))
    for file in Path(STORE).iterdir():
        file.unlink()
    record(tiny.problems(2)[1])
    name_frozen(project, "tasks/custom/calls.jsonl")

    assert freeze(None)[0] == "tasks/custom/calls.jsonl: 8 entries (replies 5, verdicts 2, environments 1)"


def test_without_a_name_the_file_is_tool_cache_jsonl_in_tasks_custom(project: Path):
    record(tiny.problems(1)[0])
    assert freeze(None)[0].startswith("tasks/custom/tool_cache.jsonl: 3 entries")


def test_a_file_that_is_no_frozen_cache_is_left_alone(project: Path):
    record(tiny.problems(1)[0])
    problems = Path("tasks/custom/problems.jsonl")
    write_jsonl(problems, [tiny.problems(1)[0].model_dump()])
    before = problems.read_bytes()
    with pytest.raises(ValueError, match="exists and is not a frozen cache"):
        freeze(problems)
    assert problems.read_bytes() == before
    freeze(Path("tasks/custom/a.jsonl")), freeze(Path("tasks/custom/a.jsonl"))  # its own


def test_with_nothing_recorded_there_is_nothing_to_freeze(project: Path):
    with pytest.raises(ValueError, match=r"artifacts/\.tool_cache: contains no recorded replies.*mode: record first"):
        freeze(Path("tasks/custom/calls.jsonl"))
    assert sorted(item.name for item in project.iterdir()) == ["params.yaml"]


def test_a_file_that_dvc_would_not_watch_is_refused(project: Path):
    record(tiny.problems(1)[0])
    with pytest.raises(ValueError, match=r"'data/calls.jsonl' is not in tasks/custom/.*tasks/custom/calls.jsonl"):
        freeze(Path("data/calls.jsonl"))
    assert not (project / "data").exists()
