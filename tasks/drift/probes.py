"""Pins replies of tools: plays a few known solutions and compares their replies with a later day's.

A schema does not show a renamed field of a reply or a default with a new meaning; a reply does. What differs between
plays (a clock, a counter, a random draw) is pinned only as far as the plays agree: whole text, fields, shape, or
nothing. Today's date and the time of now are blanked in what is pinned (`clocks.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tasks.core import json_text
from tasks.core.json_diff import arrow, listed, order, shown_name
from tasks.core.records import Problem
from tasks.drift.clocks import is_now, same_but_for_clocks, without_now
from tasks.tools.base import ToolReply, Verdict
from tasks.tools.replay import Played, Script

TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array",
}  # fmt: skip
NUMBERS = {"integer", "number"}
ANY = "any"

Field = dict[str, Any]  # {"type": …}, and "value" if pinned
Fields = dict[str, Field]  # by place: `flight.cost`, `rows[0].name`; "": a bare value, or not JSON


def choose_probes(problems: Iterable[Problem], num: int) -> list[Problem]:
    """At most `num` problems whose references use every tool, then every form of call, then every category.

    Greedy; stops when no problem adds anything. A form is the set of given arguments, so that a reply shows the default
    of an omitted one.
    """
    candidates: dict[tuple[frozenset[Any], ...], Problem] = {}
    for problem in problems:
        calls = [call for turn in problem.reference for call in turn.calls]
        tools = frozenset(call.name for call in calls)
        forms = frozenset((call.name, frozenset(call.arguments)) for call in calls)
        candidates.setdefault((tools, forms, frozenset([problem.category])), problem)
    seen: list[set[Any]] = [set(), set(), set()]
    chosen: list[Problem] = []

    def gain(marks: tuple[frozenset[Any], ...]) -> list[int]:
        return [len(new - known) for new, known in zip(marks, seen, strict=True)]

    while candidates and len(chosen) < num:
        best = max(candidates, key=gain)
        if not any(gain(best)):
            break
        chosen.append(candidates.pop(best))
        for known, new in zip(seen, best, strict=True):
            known |= new
    return chosen


def pin_probes(problems: Sequence[Problem], plays: Sequence[Sequence[Played]]) -> list[dict[str, Any]]:
    """Each problem with its calls, what its plays have in common, and the verdict, as JSON."""
    return [_pin(problem, [play[number] for play in plays]) for number, problem in enumerate(problems)]


def _pin(problem: Problem, plays: Sequence[Played]) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": call.arguments, "reply": pin_reply([play.replies[number] for play in plays])}
        for number, call in enumerate(Script.reference(problem).calls)
        if call is not None and all(number < len(play.replies) for play in plays)
    ]
    errors = [f"{type(play.error).__name__}: {play.error}" for play in plays if play.error is not None]
    return {
        "problem": problem.model_dump(),
        "calls": calls,
        "verdict": _pin_verdicts([play.verdict for play in plays]),
        "error": errors[0] if errors else None,
    }


def _pin_verdicts(verdicts: Sequence[Verdict | None]) -> dict[str, Any] | None:
    """Each check with its result, or the list of its results where plays differ; None where a play has no verdict."""
    given = [{"success": verdict.success, **verdict.checks} for verdict in verdicts if verdict is not None]
    if len(given) < len(verdicts):
        return None
    results = {check: {play.get(check) for play in given} for check in dict.fromkeys(chain(*given))}
    return {check: found.pop() if len(found) == 1 else sorted(found, key=str) for check, found in results.items()}


def pin_reply(replies: Sequence[ToolReply]) -> dict[str, Any]:
    """What replies to the same call have in common: `text`, `fields`, `shape` or nothing; and `valid`."""
    pinned: dict[str, Any] = {"valid": replies[0].valid} if len({reply.valid for reply in replies}) == 1 else {}
    texts = [reply.text for reply in replies]
    plays = [fields_of(text) for text in texts]
    if len(set(texts)) == 1 and not any(is_of_now(field["value"]) for field in plays[0].values()):
        return {**pinned, "text": texts[0]}
    if all(play.keys() == plays[0].keys() for play in plays):
        return {**pinned, "fields": {place: _agree_on([play[place] for play in plays]) for place in plays[0]}}
    shapes = [shape_of(play) for play in plays]
    return {**pinned, "shape": shapes[0]} if all(shape == shapes[0] for shape in shapes) else pinned


def fields_of(text: str) -> Fields:
    """Each value of a JSON reply by its place; other text is one value of type `text`."""
    try:
        return dict(_leaves(json_text.parse(text), ""))
    except ValueError:
        return {"": {"type": "text", "value": text}}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Field]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, {"type": TYPES[type(value)], "value": value}


def shape_of(fields: Fields) -> Fields:
    """Places and types; all elements of a list count as one."""
    types: dict[str, str] = {}
    for place, field in fields.items():
        merged = _any_element(place)
        types[merged] = _common_type([types[merged], field["type"]]) if merged in types else field["type"]
    return {place: {"type": type} for place, type in types.items()}


def _agree_on(fields: Sequence[Field]) -> Field:
    """The common type, and the value if all plays have the same; what a clock wrote in it is blanked."""
    pinned = {"type": _common_type([field["type"] for field in fields])}
    values = [blank(field["value"]) for field in fields]
    is_fixed = pinned["type"] != ANY and all(value == values[0] for value in values)
    return {**pinned, "value": values[0]} if is_fixed and not is_of_now(values[0]) else pinned


def _common_type(types: Sequence[str]) -> str:
    kinds = set(types)
    return kinds.pop() if len(kinds) == 1 else "number" if kinds == NUMBERS else ANY


def is_of_now(value: Any) -> bool:
    """Whether a clock wrote it, or a part of it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return is_now(value)
    return blank(value) != value


def blank(value: Any) -> Any:
    """A text without today's date and the time of now; anything else as it is."""
    return without_now(value) if isinstance(value, str) else value


def probe_changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per difference between two pins of the same problems; equal differences share a line."""
    found: dict[str, list[str]] = {}  # what changed → each case
    for before, after in zip(old, new, strict=False):
        for what, how in _differences(before, after):
            found.setdefault(what, []).append(how)
    return [
        f"{what}{cases[0]}{f' (and {len(cases) - 1} more like it)' if len(cases) > 1 else ''}"
        for what, cases in found.items()
    ]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    problem = shown_name(old["problem"]["id"])
    if old["error"] != new["error"]:
        yield f"problem {problem}: an error of its reference solution: ", arrow(old["error"], new["error"])
    for before, after in zip(old["calls"], new["calls"], strict=False):
        for what, how in _reply_differences(before["reply"], after["reply"]):
            yield f"reply of {shown_name(before['name'])}: {what}", how
    if old["verdict"] is not None and new["verdict"] is not None:
        for check in {**old["verdict"], **new["verdict"]}:
            was, now = old["verdict"].get(check), new["verdict"].get(check)
            if was != now and not isinstance(was, list):
                varies = ", from play to play" if isinstance(now, list) else ""
                what = f"verdict on a reference solution: {shown_name(check)}: {arrow(was, now)}{varies}"
                yield what, f", as for {problem}"


def _reply_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "valid" in old and old["valid"] != new.get("valid"):
        often = "" if "valid" in new else " in some plays"
        yield f"the call is now {'turned down' if old['valid'] else 'accepted'}{often}", ""
    before, after = _comparable(old, new)
    if "text" in old and "text" in new and old["text"] != new["text"] and before == after:
        if list(before) == list(after):
            yield "written otherwise: ", arrow(old["text"], new["text"])
        else:
            yield f"its fields, {order(before, after)}", ""
    gone = {place: field for place, field in before.items() if place not in after}
    added = {place: field for place, field in after.items() if place not in before}
    phrases = [f"{_named(fields)} {word}" for fields, word in ((gone, "gone"), (added, "new")) if fields]
    if phrases:
        yield f"field {', '.join(phrases)}", ""
    for place, was in before.items():
        now = after.get(place, was)
        if _common_type([was["type"], now["type"]]) == ANY and ANY not in (was["type"], now["type"]):
            yield f"{_shown(place)}type {was['type']} → {now['type']}", ""
        elif "value" in was and "value" in now and not _is_same(was["value"], now["value"]):
            yield _shown(place), arrow(was["value"], now["value"])


def _is_same(was: Any, now: Any) -> bool:
    if isinstance(was, str) and isinstance(now, str):
        return was == now or same_but_for_clocks(was, now)
    return json.dumps(was) == json.dumps(now)


def _comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Both replies at the finest common level; empty if one of them never repeats."""
    for view in (_fields, _shape):
        before, after = view(old), view(new)
        if before is not None and after is not None:
            return before, after
    return {}, {}


def _fields(pinned: Mapping[str, Any]) -> Fields | None:
    return fields_of(pinned["text"]) if "text" in pinned else pinned.get("fields")


def _shape(pinned: Mapping[str, Any]) -> Fields | None:
    fields = _fields(pinned)
    return pinned.get("shape") if fields is None else shape_of(fields)


def _any_element(place: str) -> str:
    return re.sub(r"\[\d+\]", "[*]", place)


def _shown(place: str) -> str:
    return f"{shown_name(_any_element(place))}: " if place else ""


def _named(fields: Fields) -> str:
    shown = [shown_name(place) if place else f"(a bare {field['type']})" for place, field in fields.items()]
    return f"{listed(shown)} {'is' if len(fields) == 1 else 'are'}"
