"""One contract over every environment: the worlds of the catalog, the example of its page, and what wraps a world.

An environment added here is held to what training relies on: the same problem plays the same twice, episodes never
touch each other, references score 1, and whatever a model writes is answered, in the one envelope where it is wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.bfcl.problems import problems as bfcl_problems
from tasks.environments.catalog import load_environment
from tasks.environments.settings import environment_names
from tasks.environments.tau2.desk_problems import problems as desk_problems
from tasks.environments.tau2.problems import problems as tau2_problems
from tasks.environments.tau2.settings import Domain
from tasks.tools import authoring
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Environment, Episode, Verdict, block_until
from tasks.tools.schemas import ArgumentSchema
from tasks.tools.settings import FaultSettings, PoolSettings
from tasks.tools.user.settings import UserSettings
from tests import tiny
from tests.environments import mcp_server, openenv_server
from tests.readme import page_block
from tests.worlds import QUICK, cache_settings, environment_settings

ERROR_TYPES = {"invalid_arguments", "unknown_tool", "not_found", "conflict", "rate_limited", "timeout", "unavailable"}
RARE_FAULTS = FaultSettings(
    seed=1, seen_by="model", error_rate=0.1, timeout_rate=0.1, rate_limit_rate=0.1, latency_rate=0.0,
    latency_seconds=0.0, truncate_rate=0.0, rename_rate=0.0,
)  # fmt: skip
TWO_WORKERS = PoolSettings(num_workers=2, max_restarts=0, memory_gib=4)
SCRIPT = UserSettings(played_by="script", reveal="at_once", model=None)


def is_envelope(value: Any) -> bool:
    """`{"error": {"type", "message"}}` and nothing else."""
    return (
        set(value) == {"error"}
        and set(value["error"]) == {"type", "message"}
        and value["error"]["type"] in ERROR_TYPES
        and isinstance(value["error"]["message"], str)
    )


@dataclass(frozen=True)
class Case:
    """An environment, problems it can play, and whether their references must succeed (faults may prevent it).

    `error` is the form of its error replies; only travel_desk has one of its own. A world that `reports` makes a call
    that does not fit all the same, and answers it in its own words.
    """

    environment: Environment
    problems: list[Problem]
    solvable: bool = True
    error: Callable[[Any], bool] = is_envelope
    reports: bool = False


def is_refusal_of_the_desk(value: Any) -> bool:
    """`{"status": "invalid", "tool": …}`, which has the token shape of travel_desk's ordinary replies."""
    return set(value) == {"status", "tool"} and value["status"] == "invalid" and isinstance(value["tool"], str)


def is_refusal_or_envelope(value: Any) -> bool:
    return is_envelope(value) or is_refusal_of_the_desk(value)


def travel_desk(folder: Path, **changed: Any) -> Case:
    environment = load_environment(environment_settings(**changed))
    return Case(environment, tiny.problems(34, max_level=4), error=is_refusal_of_the_desk)


def agent(folder: Path) -> Case:
    """The world of an agent that is not launched, as references are played."""
    environment = load_environment(environment_settings("agent"))
    return Case(environment, tiny.problems(34, max_level=4), error=is_refusal_of_the_desk)


def with_cache(folder: Path) -> Case:
    cache = cache_settings("replay", folder / "cache")
    return travel_desk(folder, cache=cache)


def with_faults(folder: Path) -> Case:
    case = travel_desk(folder, faults=RARE_FAULTS)
    return Case(case.environment, case.problems, solvable=False, error=is_refusal_or_envelope)


def in_workers(folder: Path) -> Case:
    return travel_desk(folder, pool=TWO_WORKERS)


def page_example(folder: Path) -> Case:
    world = load_page_module(
        "stockroom", page_block("tasks/environments/README.md", "python", "class Stockroom(")
    ).Stockroom()
    return Case(world, list(world.generate(seed=1, num_problems=40, max_level=1)))


def custom(folder: Path) -> Case:
    """The example of tasks/custom."""
    load_page_module("tasks.custom.page_shop", page_block("tasks/custom/README.md", "python", "class Shop"))
    settings = {"object": "tasks.custom.page_shop:Shop", "shelf_size": 9}
    environment = load_environment(environment_settings("custom", settings=settings))
    return Case(environment, list(environment.generate(seed=1, num_problems=40, max_level=1) or ()))


def load_page_module(name: str, code: str) -> Any:
    """A module from what a page shows. It stays among the loaded ones, where annotations are read."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, name, "exec"), vars(module))
    return module


class GuestEpisode(ToolEpisode):
    """Its tool keeps the list that it was given, and another one adds to it."""

    guests: list[str]

    @authoring.tool("Invite guests.")
    def invite(self, names: list[str]) -> list[str]:
        self.guests = names
        return names

    @authoring.tool("Invite one more.")
    def add(self, name: str) -> list[str]:
        self.guests.append(name)
        return self.guests

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(getattr(self, "guests", []) == ["Ada", "Bo"])


class Guests(ToolEnvironment):
    name, episode_class = "guests", GuestEpisode


def keeps_a_list(folder: Path) -> Case:
    calls = [ToolCall(name="invite", arguments={"names": ["Ada"]}), ToolCall(name="add", arguments={"name": "Bo"})]
    problem = Problem(
        id="p", category="c", level=1, requests=["Invite Ada and Bo."], world={}, split_group="g",
        reference=[ReferenceTurn(calls=calls, answer="Done.")],
    )  # fmt: skip
    return Case(Guests(QUICK), [problem])


def mcp(folder: Path) -> Case:
    environment = load_environment(mcp_server.environment_settings(folder))
    return Case(environment, mcp_server.problems(12))


def openenv(folder: Path) -> Case:
    """A stand-in server of the protocol; `tests/examples/test_openenv.py` plays the package's own."""
    environment = load_environment(openenv_server.environment_settings())
    return Case(environment, list(environment.generate(seed=1, num_problems=6, max_level=1) or ()))


def bfcl(folder: Path) -> Case:
    problems = random.Random(0).sample(bfcl_problems("multi_turn_base", "first"), 30)
    return Case(load_environment(environment_settings("bfcl")), problems, reports=True)


def research(folder: Path) -> Case:
    environment = load_environment(environment_settings("research"))
    return Case(environment, list(environment.generate(seed=1, num_problems=40, max_level=4) or ()))


def tau2(folder: Path) -> Case:
    problems = random.Random(0).sample(list(tau2_problems().values()), 30)
    return Case(load_environment(environment_settings("tau2")), problems)


def desk(folder: Path, domain: Domain) -> Case:
    """A conversation of tau2, whose user a script plays."""
    section = environment_settings("tau2", settings={"domain": domain, "problems": "base"}, user=SCRIPT)
    return Case(load_environment(section), list(desk_problems(domain).values())[:30])


def mixture(folder: Path) -> Case:
    """Two environments whose tools have some names in common."""
    environment = load_environment(environment_settings("mixture"))
    problems = list(environment.generate(seed=1, num_problems=24, max_level=4) or ())
    return Case(environment, problems, error=is_refusal_or_envelope, reports=True)


MAKERS: dict[str, Callable[[Path], Case]] = {
    "travel_desk": travel_desk,
    "mcp": mcp,
    "openenv": openenv,
    "bfcl": bfcl,
    "research": research,
    "tau2": tau2,
    "tau2, retail": partial(desk, domain="retail"),
    "tau2, airline": partial(desk, domain="airline"),
    "custom": custom,
    "agent": agent,
    "mixture": mixture,
    "stockroom, the page's": page_example,
    "a tool that keeps its list": keeps_a_list,
    "travel_desk in workers": in_workers,
    "travel_desk with cache": with_cache,
    "travel_desk with faults": with_faults,
}


# They start servers, or load a package.
SLOW = {
    "travel_desk in workers",
    "mcp",
    "openenv",
    "bfcl",
    "tau2",
    "tau2, retail",
    "tau2, airline",
    "research",
    "mixture",
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MAKERS]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = MAKERS[request.param](tmp_path_factory.mktemp("world"))
    yield made
    made.environment.close()


def replies(episode: Episode, problem: Problem) -> list[str]:
    return [
        block_until(episode.call(call.name, call.arguments)).text for turn in problem.reference for call in turn.calls
    ]


def play(case: Case, problem: Problem, stream: str = "s") -> tuple[list[str], Verdict]:
    episode = case.environment.start(problem, stream=stream)
    texts = replies(episode, problem)
    verdict = block_until(episode.verdict(problem.reference[-1].answer))
    episode.close()
    return texts, verdict


def test_every_world_of_the_catalog_is_held_to_the_contract():
    assert set(environment_names()) <= set(MAKERS)


def test_the_same_problem_plays_the_same_twice_and_is_as_it_was(case: Case):
    for problem in case.problems:
        before = problem.model_dump()
        assert play(case, problem) == play(case, problem)
        assert problem.model_dump() == before


def test_a_file_gives_its_problems_back_as_they_are(case: Case):
    """Later stages read them from one."""
    for problem in case.problems:
        assert Problem.model_validate_json(problem.model_dump_json()) == problem


def test_reference_solutions_score_1(case: Case):
    if case.solvable:
        assert all(play(case, problem)[1].success for problem in case.problems)


def test_episodes_that_are_played_at_once_do_not_touch_each_other(case: Case):
    """All problems in step, one call of each in turn, get what each gets alone; so does the same problem twice."""
    problems = [*case.problems[:6], case.problems[0]]
    alone = [play(case, problem) for problem in problems]
    episodes = [case.environment.start(problem, stream="s") for problem in problems]
    texts: list[list[str]] = [[] for _ in problems]
    calls = [[call for turn in problem.reference for call in turn.calls] for problem in problems]
    for step in range(max(map(len, calls))):
        for number, episode in enumerate(episodes):
            if step < len(calls[number]):
                call = calls[number][step]
                texts[number].append(block_until(episode.call(call.name, call.arguments)).text)
    verdicts = [block_until(e.verdict(p.reference[-1].answer)) for e, p in zip(episodes, problems, strict=True)]
    for episode in episodes:
        episode.close()
    assert list(zip(texts, verdicts, strict=True)) == alone


def test_tools_are_described_and_typed(case: Case):
    names = [tool.name for tool in case.environment.tools]
    assert names
    assert len(set(names)) == len(names)
    for tool in case.environment.tools:
        assert tool.description
        assert tool.parameters["type"] == "object"
        for argument in tool.parameters.get("properties", {}).values():
            assert {"type", "enum", "anyOf", "$ref", "const"} & set(argument)
        ArgumentSchema(tool)


def test_the_fingerprint_is_of_the_description_and_the_description_is_json(case: Case):
    description = case.environment.describe()
    assert json.loads(json.dumps(description)) == description
    assert {"tools"} <= set(description)
    assert set(description["tools"]) == {tool.name for tool in case.environment.tools}
    assert case.environment.fingerprint() == case.environment.fingerprint()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
hostile_names = st.text(max_size=30) | st.sampled_from(["__class__", "call", "verdict", "../../etc/passwd", "a" * 500])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_model_writes_is_answered_and_never_raises(case: Case, data: st.DataObject):
    tools = {tool.name: tool for tool in case.environment.tools}
    episode = case.environment.start(data.draw(st.sampled_from(case.problems)), stream="s")
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(tools)) | hostile_names)
        known = sorted(tools[name].parameters.get("properties", {})) if name in tools else []
        keys = st.sampled_from(known) | st.text(max_size=9) if known else st.text(max_size=9)
        reply = block_until(episode.call(name, data.draw(st.dictionaries(keys, json_values, max_size=6))))
        reply.text.encode()
        if not reply.valid and not (case.reports and reply.error is None):
            assert reply.error in ERROR_TYPES
            assert case.error(json.loads(reply.text))
        if name not in tools:
            assert reply.error == "unknown_tool"
    malformed = block_until(episode.malformed_call())
    assert (malformed.valid, malformed.error) == (False, "invalid_arguments")
    assert case.error(json.loads(malformed.text))
    assert isinstance(block_until(episode.verdict(data.draw(st.none() | st.text(max_size=40)))), Verdict)
    episode.close()


@pytest.mark.slow
def test_a_pool_that_has_no_effect_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    load_environment(mcp_server.environment_settings(tmp_path).model_copy(update={"pool": TWO_WORKERS})).close()
    assert "environment.pool has no effect on mcp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in environment_names() if name not in ("mcp", "openenv", "custom")])
def test_worker_processes_play_what_this_process_plays(name: str, tmp_path: Path):
    """The servers of mcp and openenv are processes already; tests/tools/test_pool.py plays a world of a user's own."""
    case = MAKERS[name](tmp_path)
    pooled = load_environment(environment_settings(name, pool=TWO_WORKERS))
    try:
        assert pooled.fingerprint() == case.environment.fingerprint()
        there = Case(pooled, case.problems)
        for problem in case.problems[:12]:
            assert play(there, problem) == play(case, problem)
    finally:
        pooled.close()
        case.environment.close()
