"""`evaluate.also`: the models in environments that training never saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import write_jsonl
from tasks.core.settings import load, read_params
from tasks.environments.catalog import load_environment
from tasks.models.trained_on import TrainedOn, digests_of, write_trained_on
from tasks.stages.evaluate.settings import AlsoSettings, EvaluateSections
from tasks.stages.evaluate.transfer import refuse_seen, solvable_problems
from tests import tiny
from tests.conftest import ROOT
from tests.contracts.test_environments import load_page_module
from tests.readme import page_block
from tests.stages.evaluate.stage_folder import ENVIRONMENT, evaluated, files_of, stage_folder
from tests.worlds import NO_BUDGETS, TWO_WORLDS

BFCL = {"categories": ["multi_turn_base"], "turns": "first"}


@pytest.fixture(autouse=True)
def shop() -> None:
    load_page_module("tasks.custom.page_shop", page_block("tasks/custom/README.md", "python", "class Shop"))


def also(name: str = "custom", settings: Any = None, **changed: Any) -> dict[str, Any]:
    given = settings or {"object": "tasks.custom.page_shop:Shop", "shelf_size": 9}
    parts = {"name": name, "settings": given, "source": None, "max_level": None, "budgets": NO_BUDGETS}
    return {**parts, "num_problems": 6, "samples_per_problem": 2, **changed}


def sections(environment: dict[str, Any] | None = None, *others: dict[str, Any]) -> EvaluateSections:
    params = read_params(ROOT / "params.yaml")
    params["environment"] = {**ENVIRONMENT.model_dump(mode="json"), **(environment or {})}
    params["evaluate"]["also"] = list(others)
    return load(EvaluateSections, params)


@pytest.mark.slow
def test_a_row_per_environment_with_its_own_budgets_and_nothing_else_changes(tmp_path: Path):
    paths = stage_folder(tmp_path)
    without = evaluated(paths, greedy=False)
    before = files_of(paths)
    budgets = {**NO_BUDGETS, "max_turns": 2}
    evaluation = evaluated(paths, greedy=False, also=[also(budgets=budgets)])
    row = evaluation.pop("also")["custom-Shop"]
    for policy in ("base", "warm_start", "best"):
        assert evaluation["contents"].pop(f"also_custom-Shop_{policy}.jsonl")
    assert evaluation == without
    assert {name for name in files_of(paths) if name in before} == set(before)
    assert set(row["results"]) == {"base", "warm_start", "best"}
    result = row["results"]["best"]
    assert (result["num_problems"], result["samples_per_problem"], row["num_unsolvable"]) == (6, 2, 0)
    assert row["gain"]["difference"] == 0.0  # all three are one untrained model
    assert row["gain"]["ci_low"] <= 0 <= row["gain"]["ci_high"]
    lines = (paths.stage("evaluate") / "trajectories" / "also_custom-Shop_best.jsonl").read_text().splitlines()
    played = list(map(json.loads, lines))
    assert len(played) == 12
    assert max(len(item["turns"]) for item in played) <= 2


@pytest.mark.parametrize(
    ("environment", "others", "says"),
    [
        ({}, [also("travel_desk", None) | {"settings": None}], "travel_desk, which this run trains on"),
        ({"name": "mixture", "settings": TWO_WORLDS}, [also("bfcl", BFCL)], "bfcl, which this run trains on"),
        ({}, [also(), also()], "custom-Shop twice"),
        ({}, [also("mixture", TWO_WORLDS)], "names a mixture"),
        ({}, [also("bfcl", BFCL, source="problems.jsonl")], "is not in tasks/custom/"),
        ({}, [also("tau2", {"domain": "retail", "problems": "base"})], "conversations, so nobody would answer"),
        ({}, [also("desk")], "there is no folder 'desk'"),
    ],
)
def test_an_environment_that_training_sees_is_refused_in_one_line(
    environment: dict[str, Any], others: list[dict[str, Any]], says: str
):
    with pytest.raises(ValueError, match=says):
        sections(environment, *others)


def test_the_same_class_with_other_settings_is_no_other_environment():
    trained = {"name": "custom", "settings": {"object": "tasks.custom.page_shop:Shop", "shelf_size": 5}}
    with pytest.raises(ValueError, match="custom-Shop, which this run trains on"):
        sections(trained, also())


def test_problems_that_the_snapshot_learnt_from_are_refused(tmp_path: Path):
    other = AlsoSettings.model_validate(also())
    problems, num_left_out = solvable_problems(other, sections({}, also()))
    assert (len(problems), num_left_out) == (6, 0)
    model = tiny.model_folder(tmp_path / "model")
    write_trained_on(model, TrainedOn(digests_of(tiny.problems(4))))
    refuse_seen(other, problems, model)
    write_trained_on(model, TrainedOn(digests_of(problems[:2])))
    with pytest.raises(ValueError, match=r"2 of 6 problems of custom-Shop.* learnt from"):
        refuse_seen(other, problems, model)


def test_a_problem_whose_reference_does_not_solve_it_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = AlsoSettings.model_validate(also())
    settings = sections({}, also())
    rows = list(load_environment(other.within(ENVIRONMENT)).generate(seed=1, num_problems=3, max_level=9) or ())
    broken = rows[0].model_copy(update={"reference": [rows[0].reference[0].model_copy(update={"calls": []})]})
    file = tmp_path / "tasks" / "custom" / "rows.jsonl"
    write_jsonl(file, [row.model_dump() for row in (broken, *rows[1:])])
    monkeypatch.chdir(tmp_path)
    from_file = AlsoSettings.model_validate(also(source="tasks/custom/rows.jsonl"))
    problems, num_left_out = solvable_problems(from_file, settings)
    assert ([problem.id for problem in problems], num_left_out) == ([row.id for row in rows[1:]], 1)
    write_jsonl(file, [broken.model_dump()])
    with pytest.raises(ValueError, match="no reference solution of 1 problems"):
        solvable_problems(from_file, settings)
