"""The example of a published MCP server: its world is sound, its server leaks without a folder of its own, and its page
leads from an empty folder to a champion.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.examples.memory import checker
from infra.examples.memory.checker import remembered
from infra.examples.memory.problems import problems
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.doctor import examine
from tasks.core.records import Problem, ToolCall
from tasks.core.settings import Paths, load
from tasks.drift.leaks import find_leaks
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.stage import run as curate
from tasks.tools.base import Environment
from tasks.tools.replay import Script, play
from tests.conftest import ROOT
from tests.pipeline.project import make_project
from tests.profiles import profile_params

EXAMPLE = ROOT / "infra" / "examples" / "memory"
MORE = ToolCall(
    name="create_entities", arguments={"entities": [{"name": "Zoe", "entityType": "cat", "observations": []}]}
)
PROBLEMS = [Problem.model_validate(row) for row in problems()]


def profile(**mcp: Any) -> dict[str, Any]:
    """The example's params; `mcp` replaces values of that section."""
    params = profile_params("memory")
    params["environment"]["settings"] |= mcp
    return params


def world_of(**mcp: Any) -> Environment:
    return load_bare_environment(EnvironmentSettings.model_validate(profile(**mcp)["environment"]))


@pytest.fixture(autouse=True)
def in_the_projects_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def the_checker_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page's `cp` does it."""
    monkeypatch.setitem(sys.modules, "tasks.custom.memory_checker", checker)


def test_the_problems_are_written_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "example" / "problems.py"
    script.parent.mkdir()
    shutil.copy(EXAMPLE / "problems.py", script)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "problems.jsonl: 480 problems" in done.stdout
    assert [json.loads(line) for line in script.with_name("problems.jsonl").open()] == list(problems())


@pytest.mark.slow
@pytest.mark.node
def test_what_is_curated_passes_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems()))
    params, paths = profile(), Paths(tmp_path / "artifacts")
    params["curate"]["source"] = str(tmp_path / "problems.jsonl")
    curate(load(CurateSections, params), paths)
    card = json.loads((paths.stage("curate") / "card.json").read_text())
    assert min(card["num_problems"].values()) >= 60
    examined = {item.check: item for item in examine(DoctorContext(load(DoctorSections, params), paths))}
    of_the_machine = {"threads", "memory", "disk", "duration"}
    assert {item.result for name, item in examined.items() if name not in of_the_machine} == {"pass"}, examined


@pytest.mark.slow
@pytest.mark.node
def test_the_servers_file_leaks_though_each_episode_has_a_process_of_its_own(tmp_path: Path) -> None:
    """And is found out each time, though what was tried the first time stays in the file."""
    kept = {"MEMORY_FILE_PATH": {"value": str(tmp_path / "memory.jsonl")}}
    world = world_of(environment=kept, reset="process", max_servers=1)
    both = [problem for problem in PROBLEMS if problem.category == "both"]
    first, again = find_leaks(world, both[::2]), find_leaks(world, both[1::2])
    assert "doing nothing ends in {'memory': False, 'answer': False}" in first[0]
    assert "a tool first answers" in again[0]
    world.close()


@pytest.mark.slow
@pytest.mark.node
def test_every_category_is_judged_by_what_the_memory_holds() -> None:
    world = world_of()
    one_of_each = list({problem.category: problem for problem in PROBLEMS}.values())
    assert len(one_of_each) == 4
    for problem in one_of_each:
        (turn,) = problem.reference
        solution, other, silent = play(
            world,
            [
                Script.reference(problem),
                Script(problem, [([MORE, *turn.calls], turn.answer)]),
                Script(problem, [(turn.calls, "Done.")]),
            ],
        )
        assert solution.verdict is not None and solution.verdict.success
        assert other.verdict is not None and other.verdict.checks == {"memory": False, "answer": True}
        assert silent.verdict is not None and silent.verdict.checks == {"memory": True, "answer": False}
    world.close()


def test_the_checker_compares_in_any_order() -> None:
    problem = next(problem for problem in PROBLEMS if problem.category == "both")
    graph = problem.world["graph"]
    turned = {"entities": graph["entities"][::-1], "relations": graph["relations"]}
    answer = f"Noted for {problem.world['name']}."
    assert remembered(problem, [], answer, lambda *_: json.dumps(turned)) == {"memory": True, "answer": True}
    less = {"entities": graph["entities"], "relations": []}
    assert remembered(problem, [], None, lambda *_: json.dumps(less)) == {"memory": False, "answer": False}


def test_the_pins_of_the_server_name_no_address_and_can_be_checked() -> None:
    package = json.loads((EXAMPLE / "package.json").read_text())
    lock = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    assert lock[""]["dependencies"] == package["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["dependencies"].values())
    assert all("integrity" in entry for name, entry in lock.items() if name)
    assert "://" not in (EXAMPLE / "package-lock.json").read_text()


@pytest.mark.bench
@pytest.mark.node
@pytest.mark.timeout(3600)
def test_the_pages_commands_lead_from_an_empty_folder_to_a_champion(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", profile=None)
    project.follow(EXAMPLE / "README.md")
    assert project.decision()["decision"] == "promote"
    assert project.versions() == [1]
