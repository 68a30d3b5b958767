"""What the tool layer costs: a call through it, a scripted episode, a stored answer, and many episodes on a slow tool.

Every figure is a ratio or a time on one core of the machine that runs it; the best of several rounds, since machines
are shared. Written to artifacts/bench/tools.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks.chat.format import ChatFormat
from tasks.core.files import write_json
from tasks.core.records import Problem, ToolCall
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import load_environment
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, Verdict, block_until
from tests import tiny
from tests.benchmarks.demo import demo_params
from tests.benchmarks.trainer_table import Target, new_table
from tests.conftest import ROOT
from tests.worlds import QUICK, cache_settings, environment_settings

pytestmark = pytest.mark.bench
NUM_CALLS, ROUNDS, NUM_EPISODES, NUM_AT_ONCE, LATENCY_SECONDS = 20_000, 5, 3000, 256, 0.2
MICRO = 1e6
NUM_HARD = 340  # problems of every category, 20 each
TARGETS = (
    Target("layer_overhead_us", "the layer, a call", 10.0, is_ceiling=True, unit=" µs"),
    Target("scripted_episodes_per_second", "travel_desk, scripted episodes a second", 5000.0, unit=""),
    Target("bare_episodes_per_second", "travel_desk alone, scripted episodes a second of CPU", 10_000.0, unit=""),
    Target("slow_tool_ratio", "256 episodes on a tool of 200 ms, to one", 1.3, is_ceiling=True),
)


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best(work: Callable[[], Any]) -> float:
    return min(seconds_of(work) for _ in range(ROUNDS))


def bare_seconds() -> float:
    """CPU seconds to play every kind of problem in the world alone: no cache, no fault, no retry around it."""
    world = TravelDesk()
    problems = list(world.generate(seed=1, num_problems=NUM_HARD, max_level=4))
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        play(world, problems)
        rounds.append(time.process_time() - start)
    return min(rounds)


def layer_overhead() -> float:
    """Seconds a call takes through the layer more than the bare method does; two arguments, one an enumeration."""
    episode = TravelDeskEpisode(next(p for p in tiny.problems(11) if p.category == "quote/none"))
    arguments = {"amount": 55, "currency": "EUR"}

    def bare() -> None:
        for _ in range(NUM_CALLS):
            episode.convert_currency(**arguments)

    def through_the_layer() -> None:
        for _ in range(NUM_CALLS):
            episode.call("convert_currency", arguments)

    return (best(through_the_layer) - best(bare)) / NUM_CALLS


def play(world: Environment, problems: list[Problem]) -> None:
    for problem in problems:
        episode, reference = world.start(problem), problem.reference[0]
        for call in reference.calls:
            block_until(episode.call(call.name, call.arguments))
        assert block_until(episode.verdict(reference.answer)).success


def cache_seconds(folder: Path) -> dict[str, float]:
    """Seconds a call: served from the store in strict mode, recorded, and without a cache."""
    problems = tiny.problems(400)
    num_calls = sum(len(problem.reference[0].calls) for problem in problems)

    def world(mode: str) -> Environment:
        cache = cache_settings(mode, folder)
        return load_environment(environment_settings(cache=cache))

    record = seconds_of(lambda: play(world("record"), problems))
    strict, bare = best(lambda: play(world("strict"), problems)), best(lambda: play(TravelDesk(), problems))
    return {
        "cache_hit_us": strict / num_calls * MICRO,
        "cache_record_us": record / num_calls * MICRO,
        "uncached_call_us": bare / num_calls * MICRO,
    }


class SlowEpisode(ToolEpisode):
    """Its one tool takes as long as a service across the network."""

    @tool("Look something up.", read_only=True)
    async def look_up(self) -> str:
        await asyncio.sleep(LATENCY_SECONDS)
        return "found"

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(final_message == "Done.")


class SlowWorld(ToolEnvironment):
    """The world of that tool."""

    name = "slow"
    episode_class = SlowEpisode


def slow_tool_seconds(num_episodes: int) -> float:
    """Seconds to play episodes of two slow calls each, all at once, with an engine that costs nothing."""
    chat = ChatFormat(tiny.tokenizer(), source="bench")
    call = call_text(ToolCall(name="look_up", arguments={}))
    engine = ScriptedEngine([[chat.encode(text) for text in (call, call, "Done.")]], end_of_turn=chat.end_of_turn)
    sampling = tiny.ROOMY.model_copy(update={"max_turns": 5})
    collector = Collector(
        EngineEpisodes(engine, chat, sampling),
        SlowWorld(QUICK),
        max_concurrent_episodes=NUM_AT_ONCE,
        seed=0,
        stage="bench",
    )
    problem = tiny.problems(1)[0]
    keys = [EpisodeKey(problem, 0, sample) for sample in range(num_episodes)]
    return best(lambda: collector.collect(keys))


def test_the_tool_layer_costs_next_to_nothing(tmp_path: Path) -> None:
    problems = tiny.problems(NUM_EPISODES)
    world = load_environment(environment_settings())
    figures: dict[str, float] = {
        "layer_overhead_us": layer_overhead() * MICRO,
        "scripted_episodes_per_second": NUM_EPISODES / best(lambda: play(world, problems)),
        "bare_episodes_per_second": NUM_HARD / bare_seconds(),
        "slow_tool_ratio": slow_tool_seconds(NUM_AT_ONCE) / slow_tool_seconds(1),
        **cache_seconds(tmp_path / "cache"),
    }
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "tools.json", figures)
    shown = new_table("Tools", "target", "figure", "")
    for target in TARGETS:
        shown.add_row(*target.row(figures[target.key]))
    for name, label in (("cache_hit_us", "a call answered from the store"), ("cache_record_us", "a call recorded"),
                        ("uncached_call_us", "a call without a cache")):  # fmt: skip
        shown.add_row(label, "", f"{figures[name]:.1f} µs", "")
    Console().print(shown)
    assert figures["layer_overhead_us"] <= 10
    assert figures["scripted_episodes_per_second"] >= 5000
    assert figures["bare_episodes_per_second"] >= 10_000
    assert figures["slow_tool_ratio"] <= 1.3
