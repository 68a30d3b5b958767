"""Calls made again in place: only harmless ones, a set number of times, after pauses that double."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.core import background
from tasks.core.records import Problem
from tasks.tools.base import Answer, EnvironmentFault, Tool, ToolReply, block_until
from tasks.tools.retries import RetryingEnvironment
from tasks.tools.settings import ToolSettings
from tests import tiny
from tests.worlds import QUICK

TOOLS = (
    Tool("look", "Changes nothing.", {"type": "object"}, read_only=True),
    Tool("put", "Changes nothing more when it is done twice.", {"type": "object"}, idempotent=True),
    Tool("book", "May have booked.", {"type": "object"}),
)
PROBLEM = tiny.problems(1)[0]


class Flaky:
    """An environment and its one episode: the first `num_faults` calls fail, at once or on the event loop."""

    tools = TOOLS

    def __init__(self, num_faults: int, *, later: bool, may_pass: bool = True):
        self.num_faults, self.later, self.may_pass = num_faults, later, may_pass
        self.num_calls = 0

    def start(self, problem: Problem, *, stream: str = "") -> Flaky:
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        self.num_calls += 1
        number = self.num_calls
        return background.run(self._answer_later(name, number)) if self.later else self._answer(name, number)

    def _answer(self, name: str, number: int) -> ToolReply:
        if number <= self.num_faults:
            fault = EnvironmentFault(f"fault {number}", tool=name)
            fault.may_pass = self.may_pass
            raise fault
        return ToolReply(f"answer {number}")

    async def _answer_later(self, name: str, number: int) -> ToolReply:
        return self._answer(name, number)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses asked for, none of which is made."""
    asked: list[float] = []

    async def noted(seconds: float) -> None:
        asked.append(seconds)
        await asyncio.sleep(0)

    # Of this module alone: a server that another test left running sleeps in this process too.
    its_own = SimpleNamespace(sleep=noted, wrap_future=asyncio.wrap_future)
    monkeypatch.setattr("tasks.tools.retries.asyncio", its_own)
    return asked


def call(flaky: Flaky, name: str, **changed: Any) -> ToolReply:
    settings = ToolSettings.model_validate({**QUICK.model_dump(), "max_retries": 3, "backoff_seconds": 0.5, **changed})
    episode = RetryingEnvironment(flaky, settings).start(PROBLEM)  # type: ignore[arg-type]
    return block_until(episode.call(name, {}))


both = pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])


@both
@pytest.mark.parametrize("name", ["look", "put"])
def test_a_harmless_call_is_made_again_until_it_answers(name: str, later: bool, pauses: list[float]):
    flaky = Flaky(2, later=later)
    assert call(flaky, name) == ToolReply("answer 3", num_retries=2)
    assert (flaky.num_calls, pauses) == (3, [0.5, 1.0])


@both
def test_after_the_last_retry_the_newest_fault_goes_on_and_says_how_many_there_were(later: bool, pauses: list[float]):
    flaky = Flaky(99, later=later)
    with pytest.raises(EnvironmentFault, match="look: unavailable: fault 4") as raised:
        call(flaky, "look")
    assert (flaky.num_calls, raised.value.num_retries, pauses) == (4, 3, [0.5, 1.0, 2.0])


@both
def test_a_call_that_may_have_happened_is_never_made_again(later: bool, pauses: list[float]):
    flaky = Flaky(1, later=later)
    with pytest.raises(EnvironmentFault, match="fault 1") as raised:
        call(flaky, "book")
    assert (flaky.num_calls, raised.value.num_retries, pauses) == (1, 0, [])


@both
def test_a_fault_that_would_come_again_is_not_waited_for(later: bool, pauses: list[float]):
    flaky = Flaky(99, later=later, may_pass=False)
    with pytest.raises(EnvironmentFault, match="fault 1") as raised:
        call(flaky, "look")
    assert (flaky.num_calls, raised.value.num_retries, pauses) == (1, 0, [])


@both
def test_without_retries_the_first_fault_goes_on(later: bool, pauses: list[float]):
    flaky = Flaky(1, later=later)
    with pytest.raises(EnvironmentFault, match="fault 1"):
        call(flaky, "look", max_retries=0)
    assert (flaky.num_calls, pauses) == (1, [])


@both
def test_an_answer_without_a_fault_is_passed_on_as_it_is(later: bool, pauses: list[float]):
    assert call(Flaky(0, later=later), "look") == ToolReply("answer 1")
    assert pauses == []


def test_only_a_fault_of_the_environment_is_tried_again():
    """A bug shows at once, with its own name."""

    class Broken(Flaky):
        def _answer(self, name: str, number: int) -> ToolReply:
            raise KeyError("bug")

    for later in (False, True):
        broken = Broken(0, later=later)
        with pytest.raises(KeyError, match="bug"):
            call(broken, "look")
        assert broken.num_calls == 1
