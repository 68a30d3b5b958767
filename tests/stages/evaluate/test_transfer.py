"""`evaluate.also`: the models in environments that training never saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.format import load_chat
from tasks.core.files import write_jsonl
from tasks.core.settings import load, read_params
from tasks.environments.catalog import find_environment_class, load_environment
from tasks.models.folders import model_config
from tasks.models.trained_on import TrainedOn, digests_of, write_trained_on
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.stages.evaluate.settings import AlsoSettings, EvaluateSections
from tasks.stages.evaluate.transfer import OtherProblems, read_others, solvable_problems
from tasks.tools.base import EnvironmentFault
from tests import tiny
from tests.conftest import ROOT
from tests.contracts.test_environments import load_page_module
from tests.readme import page_block
from tests.stages.evaluate.stage_folder import ENVIRONMENT, evaluated, files_of, stage_folder
from tests.worlds import NO_BUDGETS, TWO_WORLDS, member

BFCL = {"categories": ["multi_turn_base"], "turns": "first"}

PLAYED: dict[str, Any] = {
    "played_by": "base",
    "reveal": "at_once",
    "model": {
        "url": None, "model": "models/base", "api_key_variable": None, "instructions": "You need help.",
        "greeting": "Hello.", "temperature": 0.0, "max_output_tokens": 20, "max_messages": 5, "max_retries": 0,
        "timeout_seconds": 60.0,
    },
}  # fmt: skip


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
    params["evaluate"] |= {"also": list(others), "sharded": None}
    return load(EvaluateSections, params)


def read(model: Path, settings: EvaluateSections) -> dict[str, OtherProblems]:
    return read_others(settings, load_chat(model), model_config(model), [model])


class Killed(BaseException):
    pass


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
    ("environment", "others", "folders"),
    [
        ({}, [], []),
        ({}, [also("bfcl", BFCL), also()], ["tasks/environments/bfcl", "tasks/environments/custom"]),
        (
            {"name": "mixture", "settings": TWO_WORLDS},
            [also()],
            ["tasks/environments/travel_desk", "tasks/environments/bfcl", "tasks/environments/custom"],
        ),
    ],
)
def test_a_killed_evaluation_goes_on_only_with_the_code_of_every_environment_it_plays_in(
    environment: dict[str, Any], others: list[dict[str, Any]], folders: list[str]
):
    assert sections(environment, *others).unwatched_folders() == folders
    assert all((ROOT / folder).is_dir() for folder in folders)


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
        ({"user": PLAYED}, [also("bfcl", BFCL)], "the answer to a question would count as the next request"),
        ({"cache": {"mode": "strict", "folder": "none", "frozen": None}}, [also()], "environment.cache.mode to replay"),
    ],
)
def test_an_environment_that_training_sees_is_refused_in_one_line(
    environment: dict[str, Any], others: list[dict[str, Any]], says: str
):
    with pytest.raises(ValueError, match=says):
        sections(environment, *others)


def test_of_ones_own_another_class_is_another_environment_also_beside_a_mixture():
    shop, kiosk = ({"object": f"tasks.custom.page_shop:{name}", "shelf_size": 9} for name in ("Shop", "Kiosk"))
    page: Any = sys.modules["tasks.custom.page_shop"]
    page.Kiosk = type("Kiosk", (page.Shop,), {})
    for trained in ({"name": "custom", "settings": shop}, mixture_of("travel_desk", shop)):
        assert sections(trained, also(settings=kiosk)).evaluate.also[0].label == "custom-Kiosk"
        with pytest.raises(ValueError, match="custom-Shop, which this run trains on"):
            sections(trained, also(settings=shop))


def mixture_of(name: str, custom: dict[str, Any]) -> dict[str, Any]:
    return {"name": "mixture", "settings": {"members": [member(name), member("custom", custom)]}}


def test_the_same_class_with_other_settings_is_no_other_environment():
    trained = {"name": "custom", "settings": {"object": "tasks.custom.page_shop:Shop", "shelf_size": 5}}
    with pytest.raises(ValueError, match="custom-Shop, which this run trains on"):
        sections(trained, also())


def test_an_environment_whose_problems_the_user_cannot_play_is_refused_before_the_first_episode(tmp_path: Path):
    """tau2 has guidelines for whoever plays its customer; the shop has none."""
    model = tiny.model_folder(tmp_path / "model")
    tau2 = {"name": "tau2", "settings": {"domain": "retail", "problems": "base"}}
    without = {**PLAYED, "model": {**PLAYED["model"], "instructions": None}}
    budgets = {**NO_BUDGETS, "max_tokens_per_episode": 200}
    with pytest.raises(ValueError, match=r"evaluate.also, custom-Shop: .*instructions is null and .* no guidelines"):
        read(model, sections({**tau2, "user": without}, also(budgets=budgets)))
    assert read(model, sections({**tau2, "user": PLAYED}, also(budgets=budgets)))["custom-Shop"].solvable


def test_problems_that_the_snapshot_learnt_from_are_refused(tmp_path: Path):
    model = tiny.model_folder(tmp_path / "model")
    write_trained_on(model, TrainedOn(digests_of(tiny.problems(4))))
    settings = sections({}, also(budgets={**NO_BUDGETS, "max_tokens_per_episode": 200}))
    problems, num_left_out = read(model, settings)["custom-Shop"]
    assert (len(problems), num_left_out) == (6, 0)
    write_trained_on(model, TrainedOn(digests_of(problems[:2])))
    with pytest.raises(ValueError, match=r"evaluate.also, custom-Shop: 2 of 6 problems.* learnt from"):
        read(model, settings)


@pytest.mark.parametrize(
    ("of_its_own", "key"),
    [(5000, r"evaluate.also\[\].budgets.max_tokens_per_episode"), (None, "sampling.max_tokens_per_episode")],
)
def test_a_budget_that_is_too_large_is_told_by_the_key_it_is_from(tmp_path: Path, of_its_own: int | None, key: str):
    settings = sections({}, also(budgets={**NO_BUDGETS, "max_tokens_per_episode": of_its_own}))
    if of_its_own is None:
        sampling = settings.sampling.model_copy(update={"max_tokens_per_episode": 5000})
        settings = settings.model_copy(update={"sampling": sampling})
    with pytest.raises(ValueError, match=f"custom-Shop: {key} is 5000 and the model's context"):
        read(tiny.model_folder(tmp_path / "model"), settings)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"budgets": {**NO_BUDGETS, "max_tokens_per_episode": 9000}}, "the model's context is"),
        ({"budgets": {**NO_BUDGETS, "max_tokens_per_episode": 20, "max_tokens_per_turn": 8}}, "no turn fits"),
        ({"source": "tasks/custom/missing.jsonl"}, "missing.jsonl"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_played_is_told_before_the_first_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], says: str
):
    paths = stage_folder(tmp_path)
    monkeypatch.setattr(EpisodeRunner, "play", lambda *args, **kwargs: pytest.fail("an episode was played"))
    with pytest.raises(ValueError, match=rf"evaluate\.also, custom-Shop: .*{says}"):
        evaluated(paths, greedy=False, also=[also(**changed)])


@pytest.mark.slow
def test_an_environment_that_loses_its_episodes_has_no_row_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The desk has its result, the shop's tools cannot be reached."""
    few = ENVIRONMENT.tools.model_copy(update={"max_dropped_share": 0.05})
    environment = ENVIRONMENT.model_copy(update={"tools": few})
    monkeypatch.setattr("tests.stages.evaluate.stage_folder.ENVIRONMENT", environment)
    shop = find_environment_class(AlsoSettings.model_validate(also()).within(ENVIRONMENT))
    measured = EpisodeRunner.play

    def play_without_tools(self: EpisodeRunner, model: Path, problems: Any, split: str, name: str, **given: Any) -> Any:
        with monkeypatch.context() as patch:
            if split == "also_custom-Shop":
                patch.setattr(shop.episode_class, "verdict", lose)
            return measured(self, model, problems, split, name, **given)

    monkeypatch.setattr(EpisodeRunner, "play", play_without_tools)
    paths = stage_folder(tmp_path)
    evaluation = evaluated(paths, greedy=False, also=[also()])
    assert "also" not in evaluation
    assert evaluation["test"]["best"]["num_problems"] == 12
    assert not [name for name in files_of(paths) if "also_" in name]
    told = capsys.readouterr().err
    assert "evaluate.also, custom-Shop: " in told and "dvc repro --force --single-item evaluate" in told
    assert "the shop is closed" in told


def lose(*args: Any) -> None:
    raise EnvironmentFault("the shop is closed")


@pytest.mark.slow
def test_other_data_of_the_environment_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A killed stage goes on with the episodes that it has; not where the environment would answer otherwise now."""
    paths = stage_folder(tmp_path)
    played: list[tuple[str, int]] = []
    play = EpisodeRunner.play

    def play_and_count(self: EpisodeRunner, model: Path, problems: Any, split: str, name: str, **given: Any) -> Any:
        played.append((split, self.num_finished(problems, split, model)))
        return play(self, model, problems, split, name, **given)

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    monkeypatch.setattr(EpisodeRunner, "play", play_and_count)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.stages.evaluate.stage.refuse_altered", die)
        for _ in range(2):
            with pytest.raises(Killed):
                evaluated(paths, greedy=False, also=[also()])
        kept = [count for split, count in played if split == "also_custom-Shop"]
        assert kept == [0, 0, 0, 12, 12, 12]
    shop = find_environment_class(AlsoSettings.model_validate(also()).within(ENVIRONMENT))
    monkeypatch.setattr(shop, "describe", lambda self: {"prices": "of today"})
    played.clear()
    evaluated(paths, greedy=False, also=[also()])
    assert [count for split, count in played if split == "also_custom-Shop"] == [0, 0, 0]
    assert [count for split, count in played if split == "test"] == [12, 12, 12]


def test_a_problem_whose_reference_does_not_solve_it_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = AlsoSettings.model_validate(also())
    shop = load_environment(other.within(ENVIRONMENT))
    rows = list(shop.generate(seed=1, num_problems=3, max_level=9) or ())
    broken = rows[0].model_copy(update={"reference": [rows[0].reference[0].model_copy(update={"calls": []})]})
    file = tmp_path / "tasks" / "custom" / "rows.jsonl"
    write_jsonl(file, [row.model_dump() for row in (broken, *rows[1:])])
    monkeypatch.chdir(tmp_path)
    from_file = AlsoSettings.model_validate(also(source="tasks/custom/rows.jsonl"))
    problems, num_left_out = solvable_problems(from_file, shop, seed=1)
    assert ([problem.id for problem in problems], num_left_out) == ([row.id for row in rows[1:]], 1)
    write_jsonl(file, [broken.model_dump()])
    with pytest.raises(ValueError, match="no reference solution of 1 problem "):
        solvable_problems(from_file, shop, seed=1)
