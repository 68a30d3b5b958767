"""bfcl: fresh episodes that never touch each other, tools from the docs, problems from the package's rows."""

from __future__ import annotations

import decimal
import json
import random
import time
from collections.abc import Iterable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import mpmath
import pytest

from tasks.core.records import Problem, ToolCall
from tasks.environments.bfcl import package as bfcl_package
from tasks.environments.bfcl.environment import BFCL
from tasks.environments.bfcl.package import signature, tools_of_class
from tasks.environments.bfcl.problems import chosen_problems, problems
from tasks.environments.bfcl.settings import BFCL_CATEGORIES, BFCLCategory, BFCLSettings
from tasks.environments.catalog import load_environment
from tasks.tools.base import block_until
from tasks.tools.schemas import ArgumentSchema
from tests.environments.bfcl_mutations import Conversation, corpus, looks, seen_calls
from tests.environments.bfcl_play import BASE, LONG, WORLD, call, play, solution, with_class
from tests.worlds import cache_settings, environment_settings

pytestmark = pytest.mark.slow

FIRST = {problem.id: problem for problem in problems(BASE, "first")}


# Episodes


def test_64_episodes_at_once_get_what_each_gets_alone() -> None:
    cases = [
        case
        for category in BFCL_CATEGORIES
        for case in random.Random(7).sample(list(corpus(category, "all", per_problem=1, seed=3)), 15)
    ]
    cases += cases[:4]  # the same problem twice at once
    alone = [(episode.responses, verdict) for episode, verdict in (play(case.problem, case.turns) for case in cases)]

    episodes = [WORLD.start(case.problem) for case in cases]
    steps = [[step for turn in case.turns for step in (*turn, None)][:-1] for case in cases]
    for place in range(max(map(len, steps))):
        for episode, mine in zip(episodes, steps, strict=True):
            step = mine[place] if place < len(mine) else ...
            if step is None:
                episode.end_turn(None)
            elif isinstance(step, ToolCall):
                episode.call(step.name, step.arguments)

    assert len(episodes) == 64
    assert [(episode.responses, episode.verdict(None)) for episode in episodes] == alone


def test_a_conversation_is_recorded_and_replayed_with_its_turns_its_verdict_and_what_differed(tmp_path: Path) -> None:
    problem = problems("multi_turn_miss_func", "all")[0]
    right, wrong = solution(problem), solution(problem)
    del wrong[1][-1]

    def played(mode: str, *conversations: Conversation) -> list[Any]:
        cache = cache_settings(mode, tmp_path)
        with closing(load_environment(environment_settings("bfcl", cache=cache))) as world:
            results: list[Any] = [world.tools_for(problem)]
            for turns in conversations:
                episode = world.start(problem)
                for number, calls in enumerate(turns):
                    if number:
                        episode.end_turn(f"Done with {number}.")
                    results += [block_until(episode.call(item.name, item.arguments)) for item in calls]
                results.append(block_until(episode.verdict("Done.")))
        return results

    recorded = played("record", right, wrong)
    assert recorded[-1].details["error_type"] == "execution_response_mismatch"
    assert played("strict", right, wrong) == played("replay", right, wrong) == recorded

    unseen = [*right[:3], [call("ls"), *right[3]], *right[4:]]  # a miss, after requests that the cache answered
    assert played("replay", unseen)[-1] == play(problem, unseen)[1]


def test_the_record_says_which_check_failed_on_which_turn_and_what_differs() -> None:
    problem = problems(BASE, "all")[0]  # cd, mkdir, mv; cd, grep; sort; …
    first, second, third, *_ = solution(problem)

    without_move = play(problem, [first[:2]])[1]
    assert without_move.checks == {"answered": True, "state": False, "response": False}
    assert without_move.details == {
        "error_type": "instance_state_mismatch",
        "turn": 0,
        "differing": ["GorillaFileSystem.root"],
        "missing": [json.dumps({"result": "'final_report.pdf' moved to 'temp/final_report.pdf'"})],
    }
    without_grep = play(problem, [first, second[:1]])[1]
    assert (without_grep.details["error_type"], without_grep.details["turn"]) == ("execution_response_mismatch", 1)
    assert without_grep.checks == {"answered": True, "state": True, "response": False}

    silent = play(problem, [first, second, []])[1]
    assert (silent.details["error_type"], silent.details["turn"]) == ("empty_turn_model_response", 2)
    assert silent.checks["answered"] is False
    assert play(problem, [first, second, [*third, call("pwd")]])[1].success  # more calls never fail by themselves


def test_calls_that_do_not_fit_are_marked_and_made_and_exceptions_are_replies() -> None:
    episode = WORLD.start(FIRST["multi_turn_base_0"])

    fits = block_until(episode.call("cd", {"folder": "document"}))
    assert (fits.text, fits.valid) == ('{"current_working_directory": "document"}', True)
    retyped = block_until(episode.call("ls", {"a": "yes"}))
    assert not retyped.valid and retyped.text.startswith('{"current_directory_content": [')
    missing = block_until(episode.call("mkdir", {}))
    assert not missing.valid and missing.text.startswith("Error during execution: GorillaFileSystem.mkdir() missing 1")
    assert block_until(episode.call("mkdir", {"dir_name": "new"})).text == "None"
    refused = block_until(episode.call("mkdir", {"dir_name": "new"}))
    assert refused.valid and "File exists" in refused.text  # the world's own error: the call was in order
    unknown = block_until(episode.call("rm_rf", {"path": "/"}))
    assert not unknown.valid and unknown.error == "unknown_tool"
    assert "there is no tool rm_rf; there are: authenticate_twitter, " in unknown.text


@pytest.mark.parametrize(
    "name",
    ["_load_scenario", "__class__", "__init__", "_current_dir.contents", "cd ", "long_context", "get_flight_cost"],
)
def test_what_is_no_tool_of_the_problem_cannot_be_called(name: str) -> None:
    reply = block_until(WORLD.start(FIRST["multi_turn_base_0"]).call(name, {}))
    assert (reply.valid, reply.error) == (False, "unknown_tool")


def test_arithmetic_that_would_take_minutes_is_an_error_at_once_and_leaves_no_precision_behind() -> None:
    episode = WORLD.start(with_class("MathAPI"))
    before, started = (mpmath.mp.dps, decimal.getcontext().prec), time.process_time()

    endless: list[tuple[str, dict[str, Any]]] = [
        ("power", {"base": 10, "exponent": 10**7}),
        ("logarithm", {"value": 2, "base": 3, "precision": 10**6}),
        ("logarithm", {"value": 2, "base": 3, "precision": "1_000_000"}),
        ("logarithm", {"value": f"1e{'9' * 4000}", "base": 3, "precision": 5}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
    ]
    for name, arguments in endless:
        reply = block_until(episode.call(name, arguments))
        assert reply.text.startswith("Error during execution: ") and not reply.valid

    assert time.process_time() - started < 2  # the promise of the attacks (test_bfcl_attacks.py); it takes 0.001
    assert (
        block_until(episode.call("square_root", {"number": 2, "precision": 9})).text
        == "{'result': Decimal('1.41421356')}"
    )
    assert (
        block_until(episode.call("logarithm", {"value": 8, "base": 2, "precision": 5})).text == "{'result': mpf('3.0')}"
    )
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


def test_a_power_too_long_to_write_ends_as_it_does_where_it_is_computed() -> None:
    episode = WORLD.start(with_class("MathAPI"))
    computed, refused = (block_until(episode.call("power", {"base": 10, "exponent": n})).text for n in (5000, 10**7))
    assert computed == refused
    assert computed.startswith("Error during execution: Exceeds the limit (4300 digits)")
    assert block_until(episode.call("power", {"base": 2, "exponent": 10})).text == '{"result": 1024}'


def test_blind_looks_solve_what_they_solve_and_silence_nothing() -> None:
    blind = sum(play(problem, [looks(problem)])[1].success for problem in FIRST.values())
    silent = sum(play(problem, [[]])[1].success for problem in FIRST.values())
    assert (blind, silent) == (27, 0)  # 13.5% and 0% of 200


# Tools


def test_tools_are_those_of_the_docs_in_json_schema() -> None:
    assert len(WORLD.tools) == 128
    assert not {"dict", "float"} & set(_types([tool.parameters for tool in WORLD.tools]))
    for tool in WORLD.tools:
        ArgumentSchema(tool)
        assert set(tool.parameters["properties"]) == set(list(signature(tool.name).parameters)[1:])
    assert {len(WORLD.tools_for(problem)) for problem in FIRST.values()} <= set(range(18, 40))


def _types(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key == "type" and isinstance(item, str))
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from _types(item)


def test_read_only_tools_change_nothing() -> None:
    """Private attributes included, save the fares looked up: booking looks up its own."""
    called = set()
    for problem in problems(BASE, "first"):
        episode = play(problem, solution(problem))[0]
        before = {name: _state(instance) for name, instance in episode.model.instances.items()}
        for tool in (tool for name in problem.world["involved_classes"] for tool in tools_of_class(name)):
            if tool.read_only:
                for seen in [
                    *seen_calls().get(tool.name, [])[:3],
                    *([call(tool.name)] if not tool.parameters["required"] else []),
                ]:
                    episode.call(tool.name, seen.arguments)
                    called.add(tool.name)
        assert {name: _state(instance) for name, instance in episode.model.instances.items()} == before
    assert len(called) >= 50


def _state(instance: Any) -> dict[str, Any]:
    return {
        name: value.getstate() if isinstance(value, random.Random) else deepcopy(value)
        for name, value in vars(instance).items()
        if name != "_flight_cost_lookup"
    }


def test_a_held_out_tool_is_shown_by_the_request_that_announces_it() -> None:
    problem = problems("multi_turn_miss_func", "all")[0]
    assert problem.world["held_out"] == {"3": ["sort"]}
    shown = {tool.name for tool in WORLD.tools_for(problem)}
    assert "sort" not in shown and len(shown) == 31
    functions, question = problem.requests[3].rsplit("\n", 1)
    assert json.loads(functions)["function"]["name"] == "sort"
    assert question == "I have updated some more functions you can choose from. What about now?"
    assert not problem.reference[2].calls and problem.reference[3].calls
    assert (
        block_until(WORLD.start(problem).call("sort", {"file_name": "x"})).error is None
    )  # the package would make it too


# Problems


def test_a_request_that_nothing_can_fail_is_no_problem() -> None:
    assert [len(problems(category, "first")) for category in BFCL_CATEGORIES] == [200, 106, 119, 200]
    assert [len(problems(category, "all")) for category in BFCL_CATEGORIES] == [200] * 4


def test_problems_that_share_a_ground_truth_share_a_group_and_so_do_variants_of_one() -> None:
    first = chosen_problems(BFCLSettings(categories=[BASE], turns="first"))
    truths: dict[str, set[str]] = {}
    for problem in first:
        truths.setdefault(json.dumps(problem.reference[0].model_dump()), set()).add(problem.split_group)
    assert {len(groups) for groups in truths.values()} == {1}
    assert len({problem.split_group for problem in first}) == len(truths) == 162

    everything = chosen_problems(BFCLSettings(categories=list(BFCL_CATEGORIES), turns="all"))
    rows: dict[str, set[str]] = {}
    for problem in everything:
        rows.setdefault(problem.id.rpartition("_")[2], set()).add(problem.split_group)
    assert len(everything) == 800 and len(rows) == 200
    assert {len(groups) for groups in rows.values()} == {1}


@pytest.mark.parametrize("turns", ["first", "all"])
def test_a_group_has_its_name_whatever_categories_are_chosen(turns: Literal["first", "all"]) -> None:
    """A further category moves no problem to another side; alone, `multi_turn_base` has its ground truths as names."""
    chosen: list[list[BFCLCategory]] = [[BASE], [LONG, BASE], list(BFCL_CATEGORIES)]
    base, *others = (
        {problem.id: problem.split_group for problem in chosen_problems(BFCLSettings(categories=names, turns=turns))}
        for names in chosen
    )
    assert base == {problem.id: problem.split_group for problem in problems(BASE, turns)}
    for more in others:
        assert {id: more[id] for id in base} == base


def test_a_problem_is_a_row_of_the_package_and_its_level_the_number_of_calls() -> None:
    problem = FIRST["multi_turn_base_0"]
    assert problem.category == "multi_turn_base/TwitterAPI+GorillaFileSystem"
    assert problem.level == 3 and len(problem.requests) == len(problem.reference) == 1
    assert [call.name for call in problem.reference[0].calls] == ["cd", "mkdir", "mv"]
    assert Problem.model_validate(json.loads(problem.model_dump_json())) == problem
    levels = [problem.level for problem in FIRST.values()]
    assert (min(levels), max(levels), round(sum(levels) / 200, 1)) == (1, 7, 1.9)
    assert max(len(problem.model_dump_json()) for problem in problems(LONG, "all")) < 20_000


def test_generating_takes_the_chosen_rows_up_to_a_level_and_draws_where_fewer_are_asked_for() -> None:
    world = BFCL(settings=BFCLSettings(categories=[BASE], turns="first"))
    assert len(list(world.generate(seed=0, num_problems=1000, max_level=99))) == 200
    assert {problem.level for problem in world.generate(seed=0, num_problems=1000, max_level=1)} == {1}
    ten = [problem.id for problem in world.generate(seed=1, num_problems=10, max_level=99)]
    assert len(set(ten)) == 10 and ten == sorted(ten, key=list(FIRST).index)
    assert ten != [problem.id for problem in world.generate(seed=2, num_problems=10, max_level=99)]
    with pytest.raises(ValueError, match=r"environment\.settings is null"):
        list(WORLD.generate(seed=0, num_problems=1, max_level=1))


def test_a_conversation_is_found_by_its_id() -> None:
    found = WORLD.find_problem("multi_turn_long_context_7")
    assert len(found.requests) > 1
    for missing in ("multi_turn_base_200", "td-11-000001"):
        with pytest.raises(ValueError, match=f"no problem '{missing}'"):
            WORLD.find_problem(missing)


@pytest.mark.parametrize(
    "changed",
    [
        {"involved_classes": ["WebSearchAPI"]},
        {"involved_classes": "TicketAPI"},
        {"initial_config": {"GorillaFileSystem": {"root": {}}}},
        {"initial_config": None},
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_id(changed: dict[str, Any]) -> None:
    problem = FIRST["multi_turn_base_0"]
    broken = problem.model_copy(update={"world": {**problem.world, **changed}})
    with pytest.raises(ValueError, match="problem 'multi_turn_base_0': bfcl cannot"):
        BFCL().start(broken)


def test_a_changed_row_of_the_same_id_is_another_world() -> None:
    problem = with_class("TicketAPI")
    config = {**problem.world["initial_config"], "TicketAPI": {"ticket_counter": 77, "current_user": "ada"}}
    world = BFCL()
    world.start(problem)
    changed = world.start(problem.model_copy(update={"world": {**problem.world, "initial_config": config}}))
    assert json.loads(block_until(changed.call("create_ticket", {"title": "x"})).text)["id"] == 77


# The package


def test_the_description_holds_version_and_data_of_the_package() -> None:
    description = WORLD.describe()
    assert description["packages"] == {"bfcl-eval": "2026.3.23"}
    assert set(description["tools"]) == {tool.name for tool in WORLD.tools}
    assert BFCL(settings=BFCLSettings(categories=[LONG], turns="all")).fingerprint() == WORLD.fingerprint()


def test_without_the_package_one_line_says_how_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfcl_package, "tools_of_class", tools_of_class.__wrapped__)
    monkeypatch.setattr("tasks.environments.bfcl.environment.tools_of_class", tools_of_class.__wrapped__)
    monkeypatch.setattr(bfcl_package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps bfcl-eval") as refusal:
        BFCL()
    assert "\n" not in str(refusal.value)
