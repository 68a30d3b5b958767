"""Answers near a ground truth of BFCL, right and wrong, and the package's own verdict on them.

The package evaluates text, so it is given only names and keys of its docs and of the lists here, and values written by
`repr`. Each case is judged as in a process of its own: instances have names of their own and are removed afterwards,
and what the package leaves behind in module globals and default arguments is put back.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.posting_api import TwitterAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from tasks.core.records import Problem, ToolCall
from tasks.environments.bfcl.package import CLASSES, read_rows, signature, tools_of_class
from tasks.environments.bfcl.problems import Turns, problems
from tasks.environments.bfcl.settings import BFCL_CATEGORIES, BFCLCategory

Conversation = list[list[ToolCall]]  # the calls of each user turn
Mutation = Callable[[random.Random, Problem, Conversation], None]  # changes the conversation in place

UNKNOWN_TOOLS = ("frobnicate", "get_weather_forecast", "delete_everything", "list_all_flights", "cdd")
UNKNOWN_KEYS = ("frobnicated", "verbose", "path_name", "user_token")
LEFT_BEHIND = (long_context.CREDIT_CARD_EXTENSION, long_context.BOOKING_RECORD_EXTENSION)
PRISTINE = deepcopy(LEFT_BEHIND)
MARK = "@@"  # what stands for an instance where a text is only looked at


@dataclass(frozen=True)
class Case:
    """One answer to a problem: the calls of its first turns. `in_steps`: one call a message, else all in one."""

    problem: Problem
    kind: str
    turns: Conversation
    in_steps: bool


def corpus(category: BFCLCategory, turns: Turns, *, per_problem: int, seed: int = 0) -> Iterator[Case]:
    """Cases of a category, `per_problem` of each of its problems, the kinds in turn; the same for the same arguments.

    Half of them are changed once, the others once more in another way.
    """
    kinds = list(MUTATIONS)
    number = 0
    for problem in problems(category, turns):
        for _ in range(per_problem):
            rng = random.Random(f"{seed}/{category}/{turns}/{number}")
            kind = kinds[number % len(kinds)]
            conversation = [list(turn.calls) for turn in problem.reference]
            MUTATIONS[kind](rng, problem, conversation)
            if rng.random() < 0.5:
                MUTATIONS[rng.choice(kinds)](rng, problem, conversation)
            yield Case(problem, kind, conversation, in_steps=rng.random() < 0.5)
            number += 1


def package_verdict(
    case: Case, *, escaped: bool = False, truth: list[list[str]] | None = None
) -> tuple[bool, str | None]:
    """(valid, error type) of the package's checker, by its own ground truth or by `truth`. `escaped` writes the
    parentheses inside texts so that its regular expressions do not see them.
    """
    row, expected = row_of(case.problem)
    if escaped:
        expected = [[call_text(call, escaped=True) for call in turn.calls] for turn in case.problem.reference]
    expected = truth or expected
    texts = [[call_text(call, escaped=escaped) for call in calls] for calls in case.turns]
    steps = [[[text] for text in calls] if case.in_steps else [calls] for calls in texts]
    try:
        verdict = multi_turn_checker(steps, expected[: len(steps)], row, "", "turnwise")
    finally:
        forget()
    return verdict["valid"], verdict.get("error_type", "").removeprefix("multi_turn:") or None


def package_replies(case: Case) -> list[list[str]]:
    """What the package's executor answers to each call."""
    row, _ = row_of(case.problem)
    try:
        return [
            multi_turn_utils.execute_multi_turn_func_call(
                [call_text(call, escaped=True) for call in calls],
                row["initial_config"],
                row["involved_classes"],
                "turnwise",
                row["id"],
                long_context="long_context" in row["id"],
            )[0]
            for calls in case.turns
        ]
    finally:
        forget()


def forget() -> None:
    """Remove the instances the package keeps, and what they left in its module globals and default arguments."""
    for name in [name for name in vars(multi_turn_utils) if name.startswith("turnwise")]:
        del vars(multi_turn_utils)[name]
    for shared, pristine in zip(LEFT_BEHIND, PRISTINE, strict=True):
        shared.clear()
        shared.update(deepcopy(pristine))
    for default in TwitterAPI.post_tweet.__defaults__:
        default.clear()


def row_of(problem: Problem) -> tuple[dict[str, Any], list[list[str]]]:
    """The package's row and ground truth of a problem."""
    return _rows(problem.world["category"])[problem.id]


@cache
def _rows(category: BFCLCategory) -> dict[str, tuple[dict[str, Any], list[list[str]]]]:
    return {row["id"]: (row, truth) for row, truth in read_rows(category)}


def call_text(call: ToolCall, *, escaped: bool) -> str:
    """The call as the text the package evaluates."""
    assert call.name in known_tools() or call.name in UNKNOWN_TOOLS
    assert all(key in known_keys() or key in UNKNOWN_KEYS for key in call.arguments)
    values = {key: repr(value) for key, value in call.arguments.items()}
    if escaped:  # a parenthesis in the `repr` of JSON is always inside a text
        values = {key: text.replace("(", "\\x28") for key, text in values.items()}
    return f"{call.name}({', '.join(f'{key}={text}' for key, text in values.items())})"


def artefacts(case: Case) -> set[str]:
    """Which of the package's two regular-expression artefacts change a text of this case, or of its ground truth."""
    tools = {tool.name: MARK for name in case.problem.world["involved_classes"] for tool in tools_of_class(name)}
    found = set()
    for turn in [*(turn.calls for turn in case.problem.reference), *case.turns]:
        for text in (call_text(call, escaped=False) for call in turn):
            if multi_turn_utils._process_method_calls(text, {}) != text:
                found.add("space before a parenthesis")
            if multi_turn_utils._process_method_calls(text, tools).count(f"{MARK}.") > 1:
                found.add("tool name before a parenthesis")
    return found


@cache
def known_tools() -> frozenset[str]:
    return frozenset(tool.name for name in CLASSES for tool in tools_of_class(name))


@cache
def known_keys() -> frozenset[str]:
    return frozenset(key for tool in known_tools() for key in signature(tool).parameters)


@cache
def seen_calls() -> dict[str, list[ToolCall]]:
    """The calls of all ground truths by tool: arguments somebody meant."""
    found: dict[str, list[ToolCall]] = defaultdict(list)
    for category in BFCL_CATEGORIES:
        for problem in problems(category, "all"):
            for turn in problem.reference:
                for call in turn.calls:
                    found[call.name].append(call)
    return found


def drop(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    calls = _a_turn(rng, turns)
    if calls:
        calls.pop(rng.randrange(len(calls)))


def repeat(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    calls = _a_turn(rng, turns)
    if calls:
        calls.insert(rng.randint(0, len(calls)), rng.choice(calls))


def reorder(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    rng.shuffle(_a_turn(rng, turns))


def add(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """A call of another ground truth, of a tool that is there."""
    calls, tools = _a_turn(rng, turns), [tool for tool in _tools(problem) if tool in seen_calls()]
    calls.insert(rng.randint(0, len(calls)), rng.choice(seen_calls()[rng.choice(tools)]))


def read_only_prefix(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    calls, found = _a_turn(rng, turns), looks(problem)
    calls[:0] = rng.sample(found, rng.randint(min(1, len(found)), len(found)))


def read_only_alone(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    _a_turn(rng, turns)[:] = looks(problem)


def change_argument(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """Another value of the same tool's argument, or one next to it."""
    for call, key in _an_argument(rng, turns):
        values = [other.arguments[key] for other in seen_calls()[call.name] if key in other.arguments]
        near = _near(rng, call.arguments[key])
        call.arguments[key] = deepcopy(rng.choice(values)) if values and rng.random() < 0.5 else near


def retype_argument(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    for call, key in _an_argument(rng, turns):
        value = call.arguments[key]
        others: list[Any] = [str(value), [value], None, True, {"value": value}]
        if isinstance(value, int | float) and not isinstance(value, bool):
            others += [int(value), float(value)]
        call.arguments[key] = rng.choice(others)


def missing_argument(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    for call, key in _an_argument(rng, turns):
        del call.arguments[key]


def extra_argument(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """A key the tool does not take, or an optional one that was left out."""
    calls = _a_turn(rng, turns)
    if calls:
        call = _own_copy(calls, rng.randrange(len(calls)))
        parameters = signature(call.name).parameters.values() if call.name in known_tools() else ()
        optional = [item.name for item in parameters if item.default is not item.empty]
        key = rng.choice([*UNKNOWN_KEYS, *optional])
        call.arguments[key] = rng.choice(["a", 1, 0.5, True, ["#a"], "None"])


def unknown_tool(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """A tool that does not exist, beside a call or in its place."""
    calls = _a_turn(rng, turns)
    place = rng.randint(0, len(calls))
    calls[place : place + rng.randint(0, 1)] = [ToolCall(name=rng.choice(UNKNOWN_TOOLS), arguments={"verbose": True})]


def empty(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    _a_turn(rng, turns).clear()


def another_turn(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """A call made for one request is made for another."""
    calls = _a_turn(rng, turns)
    if calls:
        call = calls.pop(rng.randrange(len(calls)))
        _a_turn(rng, turns).append(call)


def cut_short(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """Only the first turns are given."""
    del turns[rng.randint(1, len(turns)) :]


def another_problem(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """The solution of a problem over the same classes."""
    others = [other for other in problems(problem.world["category"], "all") if other.category == problem.category]
    for calls, other in zip(turns, rng.choice(others).reference, strict=False):
        calls[:] = other.calls


def detour(rng: random.Random, problem: Problem, turns: Conversation) -> None:
    """Every call in turn at first without one of its arguments, as by an agent that learns from the error."""
    calls = _a_turn(rng, turns)
    for place in range(len(calls) - 1, -1, -1):
        if calls[place].arguments:
            attempt = ToolCall(name=calls[place].name, arguments=dict(list(calls[place].arguments.items())[1:]))
            calls.insert(place, attempt)


MUTATIONS: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        drop, repeat, reorder, add, read_only_prefix, read_only_alone, change_argument, retype_argument,
        missing_argument, extra_argument, unknown_tool, empty, another_turn, cut_short, another_problem, detour,
    )
}  # fmt: skip


def _a_turn(rng: random.Random, turns: Conversation) -> list[ToolCall]:
    return rng.choice(turns)


def _an_argument(rng: random.Random, turns: Conversation) -> Iterator[tuple[ToolCall, str]]:
    """An argument of a call that has any, on a copy of the call: calls are shared with the ground truth."""
    calls = _a_turn(rng, turns)
    places = [place for place, call in enumerate(calls) if call.arguments]
    if places:
        call = _own_copy(calls, rng.choice(places))
        yield call, rng.choice(list(call.arguments))


def _own_copy(calls: list[ToolCall], place: int) -> ToolCall:
    calls[place] = calls[place].model_copy(deep=True)
    return calls[place]


def _near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice([-1, 1])
    if isinstance(value, str):
        return rng.choice([f"{value}x", value[1:], value.upper(), f" {value}", f"{value} (copy)", f"sort({value})"])
    if isinstance(value, list):
        return rng.choice([value[1:], [*value, *value[:1]], value[::-1]])
    return {} if isinstance(value, dict) else "x"


def _tools(problem: Problem) -> list[str]:
    return [tool.name for name in problem.world["involved_classes"] for tool in tools_of_class(name)]


def looks(problem: Problem) -> list[ToolCall]:
    """The read-only tools without arguments, called."""
    tools = (tool for name in problem.world["involved_classes"] for tool in tools_of_class(name))
    return [
        ToolCall(name=tool.name, arguments={}) for tool in tools if tool.read_only and not tool.parameters["required"]
    ]
