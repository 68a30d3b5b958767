"""What the probes pin: what several replies to one call agree on, and which problems are played for it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tasks.drift.probes import choose_probes, fields_of, pin_reply, probe_changes
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.base import ToolReply
from tests.environments.shop import PROBLEM

# ---- what several replies to one call agree on


def told(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed between two pins of one reply."""
    probe = {"problem": {"id": "p"}, "verdict": None, "error": None}
    old, new = ({**probe, "calls": [{"name": "t", "reply": reply}]} for reply in (before, after))
    return probe_changes([old], [new])


def pinned(*texts: str) -> dict[str, Any]:
    return pin_reply([ToolReply(text) for text in texts])


def test_a_reply_is_pinned_as_far_as_its_plays_agree():
    assert pinned("total 3", "total 3") == {"valid": True, "text": "total 3"}
    assert pinned('{"a": 1, "b": 2}', '{"a": 1, "b": 3}') == {
        "valid": True, "fields": {"a": {"type": "integer", "value": 1}, "b": {"type": "integer"}}
    }  # fmt: skip
    assert pinned('{"rows": [1]}', '{"rows": [2, 3]}') == {"valid": True, "shape": {"rows[*]": {"type": "integer"}}}
    assert pinned('{"a": 1}', "later") == {"valid": True}
    assert pin_reply([ToolReply("x"), ToolReply("x", valid=False)]) == {"text": "x"}


@pytest.mark.parametrize("days", [-1, 0, 1])
def test_what_a_clock_wrote_is_blanked_and_the_rest_of_a_value_is_pinned(days: int):
    now = datetime.now(UTC) + timedelta(days=days)
    text = json.dumps({"at": f"{now:%Y-%m-%dT%H:%M:%SZ}", "day": f"{now:%A}", "zone": "UTC"})
    assert pinned(text, text)["fields"] == {
        "at": {"type": "string", "value": "⟨now⟩Z"},
        "day": {"type": "string", "value": "⟨now⟩"},
        "zone": {"type": "string", "value": "UTC"},
    }
    assert pinned(f"It is {now:%Y-%m-%d}.")["fields"] == {"": {"type": "text", "value": "It is ⟨now⟩."}}


def test_seconds_since_1970_are_a_clocks_and_other_large_numbers_are_not():
    now = datetime.now(UTC).timestamp()
    assert "text" not in pinned(json.dumps({"at": now}))
    assert "text" not in pinned(json.dumps({"at": int(now * 1000)}))
    assert "text" in pinned(json.dumps({"at": 123456789}))


def test_what_is_pinned_by_its_type_alone_still_tells_another_type():
    varying = pinned('{"a": 1, "b": 2}', '{"a": 1, "b": 3}')
    assert told(varying, pinned('{"a": 1, "b": 9}')) == []
    assert told(varying, pinned('{"a": 1, "b": 2.5}')) == []  # a number all the same
    assert told(varying, pinned('{"a": 1, "b": "9"}')) == ["reply of t: b: type integer → string"]
    assert told(pinned('{"r": [1]}', '{"r": [2, 3]}'), pinned('{"r": [4, 5, 6]}')) == []
    assert told(pinned('{"r": [1]}', '{"r": [2, 3]}'), pinned('{"s": [4]}')) == [
        "reply of t: field r[*] is gone, s[*] is new"
    ]
    assert told(pinned('{"r": 1}', "x"), pinned('{"anything": 1}')) == []


def test_a_text_with_a_clock_in_it_still_tells_what_else_changed():
    today, tomorrow = (f"{datetime.now(UTC) + timedelta(days=days):%d.%m.%Y}" for days in (0, 1))
    assert told(pinned(f"Rate on {today}: 3"), pinned(f"Rate on {tomorrow}: 3")) == []
    assert told(pinned(f"Rate on {today}: 3"), pinned(f"Rate on {tomorrow}: 4")) == [
        'reply of t: "Rate on ⟨now⟩: 3" → "Rate on ⟨now⟩: 4"'
    ]


@pytest.mark.parametrize("text", ["", "{", "[1, NaN]", "[1e999]", "[" * 100_000, '"\\ud800"', "9" * 400, "9" * 5000])
def test_any_reply_can_be_pinned_and_written(text: str):
    for texts in ((text,), (text, text), (text, "[2, 3]"), (text, "[2]")):
        json.dumps(pinned(*texts), allow_nan=False)
    assert fields_of(text)


# ---- which problems are probes


def test_probes_cover_every_tool_first_then_every_category_and_no_more_are_taken():
    problems = list(TravelDesk().generate(seed=3, num_problems=200, max_level=4))

    def tools(chosen: list[Any]) -> set[str]:
        return {call.name for problem in chosen for turn in problem.reference for call in turn.calls}

    assert tools(choose_probes(problems, 2)) == {tool.name for tool in TravelDesk().tools}
    everything = choose_probes(problems, 100)
    assert {problem.category for problem in everything} == {problem.category for problem in problems}
    assert len(everything) == len({problem.category for problem in problems})
    assert choose_probes(problems, 0) == choose_probes([], 5) == []


def test_a_call_that_leaves_an_argument_out_is_another_form_and_is_probed_too():
    named = PROBLEM.model_copy(deep=True, update={"id": "named"})
    named.reference[0].calls[0].arguments["currency"] = "USD"
    assert [problem.id for problem in choose_probes([PROBLEM, PROBLEM, named, named], 9)] == ["shop-1", "named"]
