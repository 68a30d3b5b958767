"""Replies that are drawn from a few values: neither a leak at curation nor a drift at later stages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tasks.core.records import Problem
from tasks.drift.leaks import find_leaks
from tasks.drift.pin import _recognise, make_pin, play_probes
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Verdict
from tests.worlds import add_environment, environment_settings

NUM_SEEDS, DRAWS = 200, random.Random()
SETTINGS = environment_settings("weather")
PROBLEM = Problem.model_validate(
    {
        "id": "w", "category": "c", "level": 1, "requests": ["How is the weather?"], "world": {},
        "reference": [{"calls": [{"name": "look", "arguments": {}}], "answer": "As it is."}], "split_group": "g",
    }
)  # fmt: skip


@pytest.fixture(
    params=[["on", "off"], [True, False], [0, 1], list("abc"), [0, 1, 2], list("abcdef"), [*range(6)]], ids=str
)
def values(request: pytest.FixtureRequest) -> list[Any]:
    return list(request.param)


@pytest.fixture
def weather(values: list[Any], monkeypatch: pytest.MonkeyPatch) -> ToolEnvironment:
    """A world whose only reply is one of the values, drawn anew in each play."""

    class Episode(ToolEpisode):
        @tool("The weather.", read_only=True)
        def look(self) -> Any:
            return {"reading": DRAWS.choice(values)}

        def verdict(self, final_message: str | None) -> Verdict:
            return Verdict(final_message == "As it is.")

    made = type("Weather", (ToolEnvironment,), {"name": "weather", "episode_class": Episode})
    add_environment(monkeypatch, "weather", made)
    return made()


def leaks(weather: ToolEnvironment, seed: int) -> bool:
    DRAWS.seed(seed)
    return bool(find_leaks(weather, [PROBLEM]))


def drifts(weather: ToolEnvironment, seed: int) -> bool:
    DRAWS.seed(seed)
    pin = make_pin(weather, [PROBLEM], [play_probes(SETTINGS, [PROBLEM]) for _ in range(2)])
    return _recognise(SETTINGS, [pin])[0] is None


def test_a_reading_of_few_values_is_no_leak(weather: ToolEnvironment) -> None:
    """Of two values, 17 plays look like a leak 1 time in 32,768; five plays do 1 time in 8."""
    assert sum(leaks(weather, seed) for seed in range(NUM_SEEDS)) <= 1


def test_a_reading_of_few_values_is_no_drift(weather: ToolEnvironment) -> None:
    """Of two values, the pin has one by chance every other time; 11 plays that all show the other are 1 in 2,048."""
    assert sum(drifts(weather, seed) for seed in range(NUM_SEEDS)) <= 1
