"""travel_desk: solvable, deterministic, judged by what happened, with errors that luck cannot pass."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import Problem, ToolCall
from tasks.core.tool_calls import call_text, parse_calls
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import block_until

WORLD = TravelDesk()
PROBLEMS = list(WORLD.generate(seed=1, num_problems=340, max_level=4))


def play(problem: Problem, calls: list[ToolCall], answer: str | None) -> bool:
    episode = WORLD.start(problem)
    for call in calls:
        episode.call(call.name, call.arguments)
    return episode.verdict(answer).success


def ask(episode: ToolEpisode, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(block_until(episode.call(name, arguments)).text))


def of(category: str) -> Problem:
    return next(p for p in PROBLEMS if p.category == category)


def test_every_reference_solution_scores_1() -> None:
    assert all(play(p, p.reference[0].calls, p.reference[0].answer) for p in PROBLEMS)


def test_categories_come_in_equal_numbers_and_levels_grow_with_the_horizon() -> None:
    counts = Counter(p.category for p in PROBLEMS)
    assert len(counts) == 17
    assert set(counts.values()) == {20}
    horizon = {level: min(len(p.reference[0].calls) for p in PROBLEMS if p.level == level) for level in (1, 2, 3, 4)}
    assert horizon == {1: 1, 2: 4, 3: 5, 4: 6}


def test_the_same_seed_writes_the_same_problems_and_a_level_can_be_left_out() -> None:
    again = list(WORLD.generate(seed=1, num_problems=340, max_level=4))
    assert again == PROBLEMS
    assert {p.level for p in WORLD.generate(seed=1, num_problems=50, max_level=2)} == {1, 2}


def test_a_missing_last_call_a_wrong_answer_and_silence_all_fail() -> None:
    for problem in PROBLEMS:
        calls, answer = problem.reference[0].calls, problem.reference[0].answer
        assert not play(problem, calls, None)
        assert not play(problem, calls, "Done.")
        assert not play(problem, calls, answer + " Or B10, B11, B12.")
        if problem.world["kind"] != "quote":
            assert not play(problem, calls[:-1], answer)


@pytest.mark.parametrize("error", ["sold_out", "declined"])
def test_whatever_choice_is_tried_first_fails(error: str) -> None:
    problem = of(f"book/{error}")
    tool, key = ("get_flight_cost", "classes") if error == "sold_out" else ("check_card", "cards")
    call = next(c for c in problem.reference[0].calls if c.name == tool)
    argument = "travel_class" if error == "sold_out" else "card_id"
    for order in (problem.world[key], problem.world[key][::-1]):
        episode = WORLD.start(problem)
        replies = [ask(episode, tool, {**call.arguments, argument: item})["status"] for item in order]
        assert replies == [error, "ok"]


def test_a_timeout_strikes_the_first_call_of_its_tool_and_no_other() -> None:
    problem = of("book/timeout/check_card")
    episode = WORLD.start(problem)
    statuses = [ask(episode, c.name, c.arguments)["status"] for c in problem.reference[0].calls]
    assert statuses == ["ok", "ok", "ok", "timeout", "ok", "ok"]


def test_any_class_and_card_the_user_accepts_will_do() -> None:
    problem = of("book/none")
    classes, cards = problem.world["classes"], problem.world["cards"]
    for travel_class in classes:
        for card in cards:
            episode = WORLD.start(problem)
            quote = problem.reference[0].calls[2].arguments | {"travel_class": travel_class}
            cost = ask(episode, "get_flight_cost", quote)["cost"]
            episode.call("check_card", {"card_id": card})
            reply = ask(episode, "book_flight", {**quote, "travel_cost": cost, "card_id": card})
            assert episode.verdict(f"Booked as {reply['booking_id']}.").success


def test_a_second_booking_fails_the_state_check() -> None:
    problem = of("book/none")
    calls = problem.reference[0].calls
    episode = WORLD.start(problem)
    for call in [*calls, calls[-1]]:
        episode.call(call.name, call.arguments)
    assert episode.verdict(problem.reference[0].answer).checks == {"state": False, "response": True}


def test_demonstrations_hold_no_error_and_no_problem_with_one_is_demonstrated() -> None:
    for number, problem in enumerate(PROBLEMS):
        shown = WORLD.demonstrate(problem, random.Random(number))
        assert (shown is None) == (problem.world["error"] != "none")
        if shown is not None:
            statuses = {json.loads(reply)["status"] for replies in shown.replies for reply in replies}
            assert statuses == {"ok"}
            calls = [call for text in shown.assistant_texts for call in parse_calls(text) if call is not None]
            assert play(problem, calls, shown.assistant_texts[-1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([tool.name for tool in WORLD.tools]) | st.text(max_size=30) | st.just("__class__")
keys = st.sampled_from(["location", "card_id", "travel_from", "booking_id", "amount", "currency"]) | st.text(max_size=9)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(st.tuples(names, st.dictionaries(keys, json_values, max_size=6)), max_size=6),
    number=st.integers(0, 339),
)
def test_hostile_calls_are_replies_and_never_raise(calls: list[tuple[str, dict[str, Any]]], number: int) -> None:
    episode = WORLD.start(PROBLEMS[number])
    for name, arguments in calls:
        assert ask(episode, name, arguments)["status"] in {"ok", "invalid", "timeout", "sold_out", "declined"}
    episode.verdict("B10 10 EUR")


def test_interleaved_episodes_do_not_touch_each_other() -> None:
    problem = of("book/declined")
    first, second = WORLD.start(problem), WORLD.start(problem)
    for call in problem.reference[0].calls:
        assert first.call(call.name, call.arguments) == second.call(call.name, call.arguments)


def test_calls_survive_text_and_malformed_ones_are_told_apart() -> None:
    call = ToolCall(name="check_card", arguments={"card_id": "card_3"})
    assert parse_calls(call_text(call) + call_text(call)) == [call, call]
    assert parse_calls("Booked as B12.") == []
    for body in (
        "{",
        "[1]",
        '{"name": 3}',
        '{"name": "x", "arguments": []}',
        '{"name": "\\ud800"}',
        '{"name": "x", "arguments": {"a": NaN}}',
    ):
        assert parse_calls(f"<tool_call>\n{body}\n</tool_call>") == [None]
    assert parse_calls('<tool_call>\n{"name": "x"') == [None]


def test_a_world_that_lacks_what_it_needs_is_one_clear_line() -> None:
    broken = of("book/none").model_copy(update={"world": {"kind": "book", "error": "none", "seed": 1}})
    with pytest.raises(ValueError, match=r"`world` lacks cards, classes, destination, month, origin"):
        WORLD.start(broken)
