"""A reward function of the user's: one more part, never more than success, and one line about every mistake."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import write_jsonl
from tasks.core.records import Score, Trajectory
from tasks.core.settings import Paths, Settings, load
from tasks.report.episodes import shown_episode
from tasks.rewards.dominance import reward_bounds
from tasks.rewards.parts import reward
from tasks.rewards.settings import RewardSettings
from tasks.rewards.stored import Rescorer
from tests.readme import page_block
from tests.rewards.shaped import LIMITS, shaped
from tests.rewards.test_rewards import PROBLEM, episode

PAGE = "tasks/custom/README.md"
MODULES = {
    "rewards": page_block(PAGE, "python", "def score"),
    "odd": """
from json import loads

number = 3

async def later(problem, trajectory): ...

def cross(problem, trajectory):
    raise KeyError("no\\nprice")

def give(problem, trajectory):
    return loads(problem.world["value"])
""",
    "wrong": "raise RuntimeError('no\\nlicence')\n",
}
ASKED = yaml.safe_load(page_block(PAGE, "yaml", "function:"))["reward"]
WEIGHTS = {"outcome": 1.0, "frugal": 0.2}


class Params(Settings):
    """A whole `params.yaml` that has nothing but the rewards."""

    reward: RewardSettings


@pytest.fixture(autouse=True)
def yours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder tasks/custom of the test's own."""
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    custom = importlib.import_module("tasks.custom")
    monkeypatch.setattr(custom, "__path__", [str(tmp_path)])
    yield
    for name in MODULES:
        sys.modules.pop(f"tasks.custom.{name}", None)
        vars(custom).pop(name, None)


def settings(function: Any, weight: float = 0.2, *others: dict[str, Any]) -> RewardSettings:
    own = {"name": "mine", "weight": weight, "function": function}
    return load(Params, {"reward": {"parts": [*others, own], "allow_undominated": False}}).reward


def scored(function: str, value: str, played: Trajectory | None = None) -> Score:
    problem = PROBLEM.model_copy(update={"world": {"value": value}})
    return reward(problem, played or episode("success"), settings(f"tasks.custom.odd:{function}"))


def test_the_pages_function_adds_a_fifth_of_the_share_of_calls_that_the_reference_needs():
    asked = load(Params, {"reward": ASKED}).reward
    needs_two = PROBLEM.model_validate(
        {**PROBLEM.model_dump(), "reference": [{"calls": [{"name": "look", "arguments": {}}] * 2, "answer": "Done."}]}
    )
    # 2 calls needed and 4 made: half of 0.2; 1 made: all of it; none made: nothing.
    success, failure = episode("success", num_calls=4), episode("failure", num_calls=1)
    assert reward(needs_two, success, asked) == Score(1.1, {"outcome": 1.0, "frugal": 0.1}, WEIGHTS)
    assert reward(needs_two, failure, asked) == Score(0.2, {"outcome": 0.0, "frugal": 0.2}, WEIGHTS)
    assert reward(needs_two, episode("failure"), asked).reward == 0.0


def test_it_is_added_to_the_other_parts_and_a_perfect_success_earns_the_most():
    asked = settings(
        "tasks.custom.odd:give", 0.3, {"name": "format", "weight": 0.1}, {"name": "call_validity", "weight": 0.2}
    )
    problem = PROBLEM.model_copy(update={"world": {"value": "1"}})
    score = reward(problem, episode("failure"), asked)
    assert score.parts == {"outcome": 0.0, "format": 0.0, "call_validity": 0.0, "mine": 0.3}
    assert astuple(reward_bounds(asked, LIMITS)) == pytest.approx((0.0, 0.6, 1.0, 1.6))


def test_without_a_function_nothing_is_imported_and_no_part_is_added():
    assert reward(PROBLEM, episode("success"), shaped()) == Score(1.0, {"outcome": 1.0}, {"outcome": 1.0})
    assert not {"tasks.custom.rewards", "tasks.custom.odd"} & set(sys.modules)


def test_a_function_is_never_asked_about_a_fault_of_the_environment():
    with pytest.raises(AssertionError, match="policy"):
        scored("give", "1", episode("environment_error"))


@pytest.mark.parametrize(
    ("function", "weight", "message"),
    [
        ("tasks.custom.odd:give", 0.0, "reward.parts.0.weight"),
        ("tasks.custom.odd:give", -0.1, "reward.parts.0.weight"),
        (None, 0.2, "reward.parts.0.function"),
        ("score", 0.2, "reward.parts.0.function: 'score' .*module:name"),
        ("tasks.custom.none:score", 0.2, "reward.parts.0.function: .*tasks.custom.none failed .*Correct the name"),
        ("tasks.custom.wrong:score", 0.2, r"reward.parts.0.function: .*\(RuntimeError: no licence\)"),
        ("tasks.custom.rewards:scores", 0.2, "reward.parts.0.function: .*did you mean score"),
        ("tasks.custom.odd:number", 0.2, "reward.parts.0.function: .*no plain function.*tasks/custom/README"),
        ("tasks.custom.odd:later", 0.2, "reward.parts.0.function: .*no plain function"),
        ("json:loads", 0.2, r"reward.parts.0.function: .json:loads. is not in tasks/custom/.*tasks.custom.json:loads"),
    ],
)
def test_what_cannot_be_the_function_is_refused_in_one_line_by_its_key(function: Any, weight: float, message: str):
    with pytest.raises(ValueError, match=rf"^params.yaml: {message}") as refusal:
        settings(function, weight)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", ["NaN", "-0.01", "1.01", "Infinity", "null", "true", '"0.5"', "[0.5]"])
def test_a_value_that_is_no_number_from_0_to_1_names_the_function_and_the_problem(value: str):
    with pytest.raises(ValueError, match=r"tasks.custom.odd:give\) .*'p0'.*not a number from 0 to 1") as refusal:
        scored("give", value)
    assert "\n" not in str(refusal.value) and "Return a float from 0 to 1" in str(refusal.value)


def test_a_stored_trajectory_of_ours_is_scored_again_and_shown_with_each_parts_weight_and_value(tmp_path: Path):
    paths = Paths(tmp_path)
    asked = settings("tasks.custom.odd:give")
    played = episode("success")
    problem = PROBLEM.model_copy(update={"world": {"value": "0.5"}, "requests": [played.request]})
    write_jsonl(paths.split("test"), [problem.model_dump(mode="json")])
    rescorer = Rescorer(paths, asked, ("test",))
    assert rescorer.score(played) == Score(1.1, {"outcome": 1.0, "mine": 0.1}, {"outcome": 1.0, "mine": 0.2})
    shown = shown_episode(played, line=1, score=rescorer.score(played))
    assert (shown["reward"], shown["parts"][-1]) == (1.1, ("mine", "0.1 = 0.2 × 0.5"))
    assert rescorer.score(episode("environment_error")) is None
    told_in_parts = replace(
        played, request="I need a note.", category=problem.category, split_group=problem.split_group
    )
    assert rescorer.score(told_in_parts) == rescorer.score(played)
    assert rescorer.score(replace(told_in_parts, split_group="others")) is None


@pytest.mark.parametrize(("value", "part"), [("0", 0.0), ("1", 0.2), ("0.25", 0.05)])
def test_the_ends_of_the_range_are_values(value: str, part: float):
    score = scored("give", value)
    assert math.isclose(score.parts["mine"], part) and score.reward == 1.0 + score.parts["mine"]


def test_an_exception_of_the_function_is_one_line():
    with pytest.raises(
        ValueError, match=r"tasks.custom.odd:cross\) .*'p0'.*KeyError: .*Correct the function"
    ) as refusal:
        scored("cross", "1")
    assert "\n" not in str(refusal.value)
