"""Faults on purpose: at the rates asked for, the same whenever they are drawn, seen by whom they are meant for."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.records import Problem
from tasks.environments.catalog import load_environment
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, EnvironmentFault, Episode, ToolReply, Verdict, block_until
from tasks.tools.faults import DegradedEnvironment, FailingEnvironment, draw
from tasks.tools.settings import FaultSettings
from tests import tiny
from tests.worlds import environment_settings

QUIET: dict[str, Any] = {
    "seed": 3,
    "seen_by": "turnwise",
    "error_rate": 0.0,
    "timeout_rate": 0.0,
    "rate_limit_rate": 0.0,
    "latency_rate": 0.0,
    "latency_seconds": 0.0,
    "truncate_rate": 0.0,
    "rename_rate": 0.0,
}
PROBLEM = tiny.problems(1)[0]


def faults(**changed: Any) -> FaultSettings:
    return FaultSettings.model_validate({**QUIET, **changed})


class TillEpisode(ToolEpisode):
    """A till: `total` only looks, `add` must not be repeated; both also as tools that wait."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.sum = 0

    @tool("The sum.", read_only=True)
    def total(self) -> dict[str, int]:
        return {"total": self.sum, "items": 1}

    @tool("Add one.")
    def add(self) -> dict[str, int]:
        self.sum += 1
        return {"total": self.sum, "items": 1}

    @tool("Add one, later.")
    async def add_later(self) -> dict[str, int]:
        return self.add()

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(True)


class Till(ToolEnvironment):
    """The world of the till."""

    name, episode_class = "till", TillEpisode


def failing(**changed: Any) -> Environment:
    return FailingEnvironment(Till(), faults(**changed))


def degraded(**changed: Any) -> Environment:
    return DegradedEnvironment(Till(), faults(**changed))


def outcome(episode: Episode, name: str) -> str:
    """The reply's text, or the type of the fault."""
    try:
        return block_until(episode.call(name, {})).text
    except EnvironmentFault as fault:
        return fault.type


def outcomes(episode: Episode, names: Iterable[str]) -> list[str]:
    return [outcome(episode, name) for name in names]


def total(episode: Episode) -> int:
    """What the till holds, faults aside."""
    while isinstance(episode, ToolEpisode) is False:
        episode = episode.inner  # type: ignore[attr-defined]
    return int(episode.sum)  # type: ignore[attr-defined]


def test_faults_come_at_the_rates_asked_for_and_exclude_each_other():
    """10% + 20% + 30% of 4,000 calls; three standard deviations of the largest are 2.2%."""
    episode = failing(error_rate=0.1, timeout_rate=0.2, rate_limit_rate=0.3).start(PROBLEM)
    shares = Counter(outcomes(episode, ["total"] * 4000))
    assert shares["unavailable"] / 4000 == pytest.approx(0.1, abs=0.022)
    assert shares["timeout"] / 4000 == pytest.approx(0.2, abs=0.022)
    assert shares["rate_limited"] / 4000 == pytest.approx(0.3, abs=0.022)


def test_rates_that_add_up_to_more_than_every_call_are_refused():
    with pytest.raises(ValueError, match=r"add up to 1\.2, above 1"):
        faults(error_rate=0.6, timeout_rate=0.6)


@given(
    seed=st.integers(0, 5), problem=st.text(max_size=4), stream=st.text(max_size=4), number=st.integers(0, 50),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_what_befalls_a_call_follows_from_seed_problem_stream_and_number_alone(
    seed: int, problem: str, stream: str, number: int, order: random.Random
):
    """Drawn alone, or among any others in any order, it is the same."""
    settings = faults(seed=seed, error_rate=0.3, timeout_rate=0.3, latency_rate=0.5, truncate_rate=0.5, rename_rate=0.5)
    alone = draw(settings, problem, stream, number)
    others = [(f"{problem}/", stream, number), (problem, f"/{stream}", number), (problem, stream, number + 1)]
    keys = [(problem, stream, number), *others]
    order.shuffle(keys)
    drawn = {key: draw(settings, *key) for key in keys}
    assert drawn[problem, stream, number] == alone
    assert len({chance.new_name for chance in drawn.values()}) == 4


@pytest.mark.slow
@given(order=st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_episodes_played_in_any_order_meet_the_faults_they_meet_alone(order: list[int]):
    environment = failing(error_rate=0.2, timeout_rate=0.2, rate_limit_rate=0.2)
    alone = [outcomes(environment.start(PROBLEM, stream=f"{n}"), ["total"] * 30) for n in range(3)]
    episodes = [environment.start(PROBLEM, stream=f"{n}") for n in range(3)]
    mixed: list[list[str]] = [[], [], []]
    for number in order:
        mixed[number].append(outcome(episodes[number], "total"))
    assert mixed == [texts[: len(part)] for texts, part in zip(alone, mixed, strict=True)]


def test_an_error_or_a_rate_limit_strikes_before_the_tool_and_a_timeout_after_it():
    """A booking that timed out may have booked: that is why it is not made again."""
    for rate, seen, booked in (("error_rate", "unavailable", 0), ("rate_limit_rate", "rate_limited", 0)):
        episode = failing(**{rate: 1.0}).start(PROBLEM)
        assert (outcome(episode, "add"), total(episode)) == (seen, booked)
    for name in ("add", "add_later"):
        episode = failing(timeout_rate=1.0).start(PROBLEM)
        assert (outcome(episode, name), total(episode)) == ("timeout", 1)


def test_a_timeout_of_a_harmless_tool_leaves_the_error_a_world_scripts_for_its_first_call():
    """Else the retry would get the second reply, and the run another trajectory than one without faults."""
    problem = next(p for p in tiny.problems(34) if p.category == "quote/timeout/convert_currency")
    call = problem.reference[0].calls[-1]
    met = set()
    for number in range(20):
        episode = FailingEnvironment(TravelDesk(), faults(timeout_rate=0.5)).start(problem, stream=f"{number}")
        num_faults = 0
        while num_faults < 20:
            try:
                assert json.loads(block_until(episode.call(call.name, call.arguments)).text)["status"] == "timeout"
                break
            except EnvironmentFault:
                num_faults += 1
        met.add(num_faults > 0)
    assert met == {True, False}


def test_a_call_made_again_has_a_new_chance():
    """Half of the calls fail; 20 that each had the same chance on every attempt would not all get through."""
    environment = load_environment(environment_settings(faults=faults(error_rate=0.5)))
    call = next(p for p in tiny.problems(4) if p.category == "book/none").reference[0].calls[0]
    answered = 0
    for number in range(20):
        try:
            answered += block_until(
                environment.start(PROBLEM, stream=f"{number}").call(call.name, call.arguments)
            ).valid
        except EnvironmentFault:
            continue
    assert 14 <= answered < 20  # three attempts: 7 in 8


def test_an_answer_that_no_fault_and_no_latency_strikes_is_there_at_once():
    assert isinstance(failing(latency_seconds=5.0).start(PROBLEM).call("add", {}), ToolReply)
    assert isinstance(degraded(seen_by="model").start(PROBLEM).call("add", {}), ToolReply)


def test_latency_is_waited_for_on_the_event_loop_by_many_at_once(monkeypatch: pytest.MonkeyPatch):
    """64 calls of 0.2 s: none is over before all of them wait, so that calls in a row would never end."""
    everyone, waited = asyncio.Barrier(64), list[float]()

    async def sleep_together(seconds: float) -> None:
        waited.append(seconds)
        async with asyncio.timeout(120):
            await everyone.wait()

    loop = SimpleNamespace(**{**vars(asyncio), "sleep": sleep_together})
    monkeypatch.setattr("tasks.tools.faults.asyncio", loop)
    environment = failing(latency_rate=1.0, latency_seconds=0.2)
    answers = [environment.start(PROBLEM, stream=f"{number}").call("add", {}) for number in range(64)]
    assert {block_until(answer).text for answer in answers} == {'{"total": 1, "items": 1}'}
    assert waited == [0.2] * 64


def test_faults_of_ours_leave_the_world_as_it_is_described_and_those_of_the_model_do_not():
    plain = Till().fingerprint()
    ours = load_environment(environment_settings(faults=faults(error_rate=0.5, latency_rate=0.5)))
    assert ours.fingerprint() == load_environment(environment_settings()).fingerprint()
    assert degraded(error_rate=0.5).fingerprint() == plain
    for changed in ({"seen_by": "model", "error_rate": 0.5}, {"truncate_rate": 0.5}, {"rename_rate": 0.5}):
        environment = degraded(**changed)
        assert environment.fingerprint() != plain
        assert environment.describe()["faults"]["seed"] == 3
    assert degraded(rename_rate=0.5).fingerprint() != degraded(rename_rate=0.5, seed=4).fingerprint()


@pytest.mark.parametrize(
    ("rate", "type", "booked"),
    [("error_rate", "unavailable", 0), ("rate_limit_rate", "rate_limited", 0), ("timeout_rate", "timeout", 1)],
)
@pytest.mark.parametrize("name", ["add", "add_later"])
def test_the_model_meets_an_error_as_a_reply_of_a_valid_call(rate: str, type: str, booked: int, name: str):
    episode = degraded(seen_by="model", **{rate: 1.0}).start(PROBLEM)
    reply = block_until(episode.call(name, {}))
    assert json.loads(reply.text) == {"error": {"type": type, "message": name}}
    assert (reply.valid, reply.error, total(episode)) == (True, type, booked)


def test_a_tool_that_does_not_exist_is_never_down():
    episode = degraded(seen_by="model", error_rate=1.0).start(PROBLEM)
    assert block_until(episode.call("nonsense", {})).error == "unknown_tool"
    assert block_until(failing(error_rate=1.0).start(PROBLEM).call("nonsense", {})).error == "unknown_tool"


@pytest.mark.parametrize("name", ["add", "add_later"])
def test_a_truncated_reply_breaks_off_without_a_note(name: str):
    texts = outcomes(degraded(truncate_rate=1.0).start(PROBLEM), [name] * 40)
    whole = [json.dumps({"total": number, "items": 1}) for number in range(1, 41)]
    assert all(text.startswith(part) and len(part) < len(text) for text, part in zip(whole, texts, strict=True))
    assert len({len(text) for text in texts}) > 10


def test_a_renamed_field_keeps_its_place_and_value():
    texts = outcomes(degraded(rename_rate=1.0).start(PROBLEM), ["total"] * 60)
    new = ("total_", "totalValue", "new_total"), ("items_", "itemsValue", "new_items")
    assert set(texts) == {f'{{"{name}": 0, "items": 1}}' for name in new[0]} | {
        f'{{"total": 0, "{name}": 1}}' for name in new[1]
    }


def test_an_error_envelope_stays_whole():
    reply = block_until(degraded(truncate_rate=1.0, rename_rate=1.0).start(PROBLEM).call("add", {"tip": 1}))
    assert json.loads(reply.text)["error"]["type"] == "invalid_arguments"


def test_what_the_model_meets_is_the_same_however_often_we_had_to_try():
    """The stream's last part is the attempt; an episode that we lost and started over leaves no trace."""
    environment = degraded(seen_by="model", error_rate=0.3, truncate_rate=0.3, rename_rate=0.3)
    first, second, other = (
        outcomes(environment.start(PROBLEM, stream=stream), ["total"] * 30) for stream in ("1/0", "1/1", "2/0")
    )
    assert first == second != other
