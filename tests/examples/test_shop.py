"""The example of an MCP server of one's own: its world is sound, both kinds of conversation are shown, and its page
leads to a champion.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.examples.shop import checker
from infra.examples.shop.problems import ROOM, problems
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.doctor import CHECKS, examine
from tasks.core.files import read_records
from tasks.core.records import Demonstration, Problem, ToolCall
from tasks.core.settings import Paths, load
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.stages.curate.settings import CurateSections
from tasks.stages.curate.stage import run as curate
from tasks.tools.replay import Script, play
from tests.conftest import ROOT
from tests.pipeline.project import make_project
from tests.profiles import profile_params

EXAMPLE = ROOT / "infra" / "examples" / "shop"
PROBLEMS = [Problem.model_validate(row) for row in problems()]


@pytest.fixture(autouse=True)
def as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the project's root, with the checker copied as the page's `cp` does it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "tasks.custom.shop_checker", checker)


def test_a_reference_fills_what_is_wanted_and_leaves_the_rest() -> None:
    for problem in PROBLEMS:
        shelf = dict(problem.world["shelf"])
        for call in (call for turn in problem.reference for call in turn.calls if call.name == "order"):
            shelf[call.arguments["product"]] += call.arguments["units"]
        assert shelf == problem.world["filled"]
    one, _, two = PROBLEMS[:3]
    assert [sum(units == ROOM for units in item.world["filled"].values()) for item in (one, two)] == [1, 2]


@pytest.mark.slow
def test_one_server_plays_episode_after_episode_and_its_errors_are_read() -> None:
    params = profile_params("small", "shop")
    params["environment"]["settings"]["max_servers"] = 1
    world = load_bare_environment(EnvironmentSettings.model_validate(params["environment"]))
    problem, other = PROBLEMS[0], PROBLEMS[2]
    wrong = [ToolCall(name="count", arguments={"product": "cheese"}), ToolCall(name="reset", arguments={"shelf": {}})]
    solved, silent, refused, again = play(
        world,
        [
            Script.reference(problem), Script(other, [([], ""), ([], "")]), Script(problem, [(wrong, "Done.")]),
            Script.reference(other),
        ],
    )  # fmt: skip
    assert [item.verdict is not None and item.verdict.success for item in (solved, silent, refused, again)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert "the shop does not sell cheese" in refused.replies[0].text
    assert not refused.replies[1].valid  # no tool of the agent's
    world.close()


@pytest.mark.slow
def test_what_is_curated_is_sound_and_shows_both_kinds_of_conversation(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in list(problems())[:300]))
    params: dict[str, Any] = profile_params("small", "shop")
    params["curate"] |= {"source": str(tmp_path / "problems.jsonl"), "num_demonstrations": 60}
    paths = Paths(tmp_path / "artifacts")
    curate(load(CurateSections, params), paths)
    shown = list(read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration))
    assert {len(item.follow_ups) for item in shown} == {0, 1}
    checks = {name: CHECKS[name] for name in ("budgets", "tools answer", "references score 1", "doing nothing")}
    examined = examine(DoctorContext(load(DoctorSections, params), paths), checks)
    assert {item.result for item in examined} == {"pass"}, examined


@pytest.mark.flow
@pytest.mark.timeout(3600)
def test_the_pages_commands_lead_from_an_empty_folder_to_a_champion(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", profile=None)
    project.follow(EXAMPLE / "README.md")
    assert project.decision()["decision"] == "promote"
    assert project.versions() == [1]
