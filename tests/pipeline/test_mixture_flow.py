"""A mixture from its problems to a champion, and another environment beside it that training never sees.

The travel desk's first level and the shop of tasks/custom's page, two to one; the kiosk is a shop with other words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project, make_project
from tests.pipeline.shops import mixed_with_desk, open_shops

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, databases: Path, prefect: dict[str, str]) -> Project:
    """A finished flow; every test below looks at this one run."""
    project = make_project(tmp_path_factory.mktemp("mixture") / "project").lay(databases)
    project.server = prefect
    open_shops(project)
    # After 16 iterations 80 problems in 30 groups can just or just not tell it from the warm start; after 24, clearly.
    project.set_params({**mixed_with_desk(also=40), "train.num_iterations": 24})
    project.flow()
    return project


def rows(project: Project, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.artifacts / name).read_text(encoding="utf-8").splitlines()]


def test_the_kiosk_was_looked_at_before_training_and_played_after_it(mixed: Project) -> None:
    (looked,) = [
        row for row in read_json(mixed.artifacts / "doctor.json")["results"] if row["check"] == "other environments"
    ]
    assert (looked["result"], looked["finding"]) == ("pass", "custom-Kiosk: 40 problems")
    row = mixed.evaluation()["also"]["custom-Kiosk"]
    assert {name: result["num_problems"] for name, result in row["results"].items()} == {
        "base": 40, "warm_start": 40, "best": 40
    }  # fmt: skip
    played = rows(mixed, "evaluate/trajectories/also_custom-Kiosk_best.jsonl")
    assert {row["outcome"] for row in played} <= {"success", "failure", "max_turns", "overlong"}
    assert "custom-Kiosk" in (mixed.artifacts / "report" / "index.html").read_text(encoding="utf-8")


def test_the_decision_is_about_the_mixture_and_the_kiosk_decides_nothing(mixed: Project) -> None:
    decision = mixed.decision()
    test = [row["id"] for row in rows(mixed, "curate/test.jsonl")]
    assert {name.partition("/")[0] for name in test} == {"travel_desk", "custom"}
    assert decision["comparison"]["num_problems"] == len(test)
    assert (decision["decision"], mixed.versions()) == ("promote", [1])
    assert list(decision["also"]) == ["custom-Kiosk"]
    assert "iosk" not in json.dumps([decision["checks"], decision["reasons"], decision["comparison"]])
