"""Problems that an environment's own `generate` writes: what a file would change in them, and what it crashes over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Problem
from tasks.environments.bfcl.environment import BFCL
from tasks.stages.curate.sources import read_problems
from tasks.tools.settings import IN_MEMORY
from tests.sums import SumsWithExpert, curate_settings, problem, worlds

__all__ = ["worlds"]


SIZES: dict[str, Any] = {}


class Shade(Enum):
    RED = "red"


class Hue(StrEnum):
    RED = "red"


class Rank(IntEnum):
    FIRST = 1


def generated(**changed: Any) -> Problem:
    """What is read of a problem after a good one; `changed` are its fields, past pydantic's checks."""

    class Generating(SumsWithExpert):
        def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
            yield problem("good")
            yield problem("odd").model_copy(update=changed)

    (_, found) = read_problems(curate_settings("sums_with_expert"), Generating())
    return found[1]


def endless() -> list[Any]:
    holder: list[Any] = []
    holder.append(holder)
    return holder


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({1: "bolts"}, "world.it is {1: 'bolts'}, which a file gives back as {'1': 'bolts'}"),
        ({(1, 2): "bolts"}, "world.it is {(1, 2): 'bolts'}, which a file gives back as {'1,2': 'bolts'}"),
        ({"place": (1, 2)}, "world.it.place is (1, 2), which a file gives back as [1, 2]"),
        ([3, {"a"}], "world.it.1 is {'a'}, which a file gives back as ['a']"),
        (date(2026, 11, 28), "world.it is datetime.date(2026, 11, 28), which a file gives back as '2026-11-28'"),
        (Shade.RED, "world.it is <Shade.RED: 'red'>, which a file gives back as 'red'"),
        ({"x": [1.5, float("nan")]}, "world.it.x.1 is nan, which no file can contain"),
        ("\ud800", r"world.it is '\ud800', which no file can contain"),
        ({"\ud800": 1}, r"world.it is {'\ud800': 1}, which no file can contain"),
        (object, "world.it is <class 'object'>, which no file can contain"),
        (endless(), "is [[...]], which no file can contain"),
    ],
    ids=str,
)
def test_a_world_that_a_file_changes_is_refused_with_its_row_and_place(value: Any, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        generated(world={"target": 3, "it": value})
    said = str(refused.value)
    assert said.startswith("tasks/environments/sums_with_expert, row 2 (odd): world.it")
    assert told in said
    assert "Correct generate() of the environment" in said
    assert "\n" not in said


def test_every_part_of_a_problem_is_held_to_the_same() -> None:
    call = {"name": "add", "arguments": {"amount": (3,)}}
    with pytest.raises(ValueError, match=r"row 2 \(odd\): reference\.0\.calls\.0\.arguments\.amount is \(3,\)"):
        generated(reference=problem(reference=[{"calls": [call], "answer": "3"}]).reference)
    with pytest.raises(ValueError, match=r"row 2 \(odd\): level: Input should be greater than or equal to 1"):
        generated(level=0)


def test_what_equals_what_a_file_gives_back_is_curated_as_the_file_gives_it() -> None:
    world = generated(world={"hue": Hue.RED, "rank": Rank.FIRST, "share": 0.1, "none": None}).world
    assert world == {"hue": "red", "rank": 1, "share": 0.1, "none": None}
    assert [type(value) for value in world.values()] == [str, int, float, type(None)]


@pytest.mark.parametrize("num_good", [0, 7])
def test_a_generator_that_crashes_is_told_with_the_row_and_the_users_line(num_good: int) -> None:
    class Crashing(SumsWithExpert):
        def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
            for number in range(num_good):
                yield problem(f"p{number}")
            yield problem(world=SIZES["missing"])

    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if 'world=SIZES["missing' in text
    )
    told = rf"generate\(\) crashed at .*test_generated\.py:{line} after {num_good} rows \(KeyError: 'missing'\)"
    with pytest.raises(ValueError, match=told) as refused:
        read_problems(curate_settings("sums_with_expert"), Crashing())
    assert "\n" not in str(refused.value)


def test_what_turnwise_itself_says_while_problems_are_generated_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^curate\.source = .* generates no problems"):
        read_problems(curate_settings("sums"), type("Silent", (SumsWithExpert,), {"generate": lambda *_, **__: None})())


def test_what_turnwise_refuses_in_a_users_generate_stays_its_own_message() -> None:
    class Extending(SumsWithExpert):
        def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
            yield from BFCL(IN_MEMORY).generate(seed=seed, num_problems=num_problems, max_level=max_level)

    with pytest.raises(ValueError, match=r"^environment\.settings is null"):
        read_problems(curate_settings("sums_with_expert"), Extending())


def test_a_world_that_is_too_deep_is_told_so() -> None:
    world: dict[str, Any] = {}
    for _ in range(90):
        world = {"in": world}
    with pytest.raises(ValueError, match=r"row 2 \(odd\): \S+ is \{.*at most \d+ levels"):
        generated(world=world)
