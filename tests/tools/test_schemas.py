"""Schemas that a server chose, and calls that a model chose: what would never come to an end is refused in one line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tasks.commands.doctor.arguments import make_up_arguments
from tasks.tools.base import Tool
from tasks.tools.schemas import MAX_EXPANDED, ArgumentSchema, SchemaSize

Schema = dict[str, Any]
PATIENCE = 60  # seconds for what takes none; each of these would take hours


@contextmanager
def soon() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < PATIENCE


def doubling(levels: int, keyword: str = "allOf") -> Schema:
    """Each definition refers twice to the next: 2 to the power of `levels` parts."""
    twice = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**twice, f"d{levels}": {"type": "string"}}}


def by_anchor(levels: int) -> Schema:
    twice: Schema = {f"d{i}": {"$anchor": f"d{i}", "allOf": [{"$ref": f"#d{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#d0", "$defs": {**twice, "last": {"$anchor": f"d{levels}"}}}


def hidden(levels: int) -> Schema:
    """The same within what is no schema at all until something refers to it."""
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/default/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/default/d0", "default": {**twice, f"d{levels}": {"type": "string"}}}


def nested(levels: int) -> Schema:
    schema: Schema = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def refused(schema: Schema) -> str:
    with soon(), pytest.raises(ValueError, match=r"^tool 'act': the schema of its arguments is not usable") as caught:
        ArgumentSchema(Tool("act", "", schema))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (doubling(40), "more than a billion parts, more than the limit of 20,000"),
        (doubling(16, "oneOf"), "262,143 parts, more than the limit of 20,000"),
        (by_anchor(40), "more than a billion parts"),
        (hidden(40), "more than a billion parts"),
        (nested(70), "nested deeper than 64 levels"),
        ({"description": "x" * (1 << 18)}, "bytes, more than the limit of 262,144"),
        (
            {"$ref": "https://elsewhere.example/schema"},
            "refers to 'https://elsewhere.example/schema', which is not in it",
        ),
        ({"$ref": "#/$defs/none"}, "which is not in it"),
        ({"properties": {"a": {"$id": "http://x/y", "$ref": "#/$defs/b"}}}, r"an \$id of its own"),
        ({"pattern": "((a{1,100}){1,100}){1,100}"}, "is not a"),
    ],
    ids=str,
)
def test_a_schema_that_is_too_much_to_check_a_call_by_is_refused_in_one_line(schema: Schema, why: str) -> None:
    assert re.search(why, refused(schema))


PATTERNS = ["^(a+)+$", "^(a|a)*$", "(.*a){30}x", r"^(a+)+\1$", "^(?=(a+)+$)(a+)+b$", "(?<!b)(a*)*c"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_characters", [3_000, 100_000, 8_000_000])
def test_a_pattern_that_backtracks_for_ever_costs_no_time(pattern: str, num_characters: int) -> None:
    """The last three look around or back, which no linear engine can: they are held against little text."""
    schema = ArgumentSchema(Tool("act", "", {"properties": {"a": {"type": "string", "pattern": pattern}}}))
    arguments = {"a": "a" * num_characters + "!"}
    with soon():
        assert not schema.is_valid(arguments)
        is_too_long = num_characters > (100_000 if pattern in PATTERNS[:3] else 4_000)
        assert schema.reasons(arguments).startswith("they have more than" if is_too_long else "a: ")
    assert schema.is_valid({"b": "x"})


CONDITION: Schema = {
    "$defs": {
        "condition": {
            "anyOf": [
                {"type": "object", "required": ["and"], "properties": {"and": {"$ref": "#/$defs/condition"}}},
                {"type": "object", "required": ["and"], "properties": {"and": {"$ref": "#/$defs/condition"}, "b": {}}},
            ]
        }
    },
    "properties": {"where": {"$ref": "#/$defs/condition"}},
}


def test_a_call_nested_in_a_schema_that_refers_to_itself_is_answered_at_once() -> None:
    """A published server may have such a schema; wording what is wrong at 18 levels took 50 s, and doubles."""
    schema = ArgumentSchema(Tool("act", "", CONDITION))
    deep: Any = 7
    for _ in range(60):
        deep = {"and": deep}
    with soon():
        assert not schema.is_valid({"where": deep})
        assert schema.reasons({"where": deep}).startswith("they do not fit the tool's schema")
        assert schema.reasons({"where": {"and": 7}}).startswith("where: ")


def test_a_call_with_a_hundred_thousand_mistakes_is_answered_at_once() -> None:
    schema = ArgumentSchema(Tool("act", "", {"properties": {"a": {"items": {"type": "integer"}}}}))
    with soon():
        assert schema.reasons({"a": ["x"] * 300_000}).startswith("they do not fit the tool's schema")
    assert schema.reasons({"a": ["x"] * 5}).endswith("and 2 more")


def test_what_servers_do_write_is_measured_part_by_part_and_taken() -> None:
    """Definitions that nothing refers to are none of it; a name of an argument is no keyword, whatever it is."""
    assert SchemaSize({"type": "object"}).num_parts == 1
    point = {"type": "object", "properties": {"x": {"type": "number"}, "$id": {"type": "string"}, "default": {}}}
    assert (
        SchemaSize({"$ref": "#/$defs/p", "$defs": {"p": point, "q": point}}).num_parts == 1 + 4
    )  # itself; a point with three
    assert SchemaSize(doubling(10)).num_parts < MAX_EXPANDED
    assert SchemaSize(CONDITION).is_recursive and not SchemaSize(doubling(10)).is_recursive
    ArgumentSchema(Tool("act", "", {"$id": "https://x/y", "properties": {"a": {"pattern": "^(?!-)[a-z-]+$"}}}))


@pytest.mark.parametrize("argument", [{"type": "array", "minItems": 10**12}, {"type": "string", "minLength": 10**12}])
def test_the_doctor_makes_up_no_endless_arguments(argument: Schema) -> None:
    twice = {"type": "array", "items": argument, "minItems": 10**9}
    with soon():
        assert len(str(make_up_arguments({"properties": {"a": twice}, "required": ["a"]}))) < 20_000_000
