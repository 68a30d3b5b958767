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
        ({"pattern": "((a{1,100}){1,100}){1,100}"}, "is not a pattern that can be checked"),
        ({"properties": {"a": {"pattern": "("}}}, "^tool 'act': .* usable .\"[(]\" is not a pattern"),
        ({"$ref": "#/const", "const": {"pattern": "^(?!a)"}}, "is not a .regex"),
    ],
    ids=str,
)
def test_a_schema_that_is_too_much_to_check_a_call_by_is_refused_in_one_line(schema: Schema, why: str) -> None:
    assert re.search(why, refused(schema))


LINEAR = ["^(a+)+$", "^(a|a)*$", "(.*a){30}x"]
LARGE = ["(.*a){1700}x", "(.?){2000}x"]
BACKTRACKING = [r"^(a+)+\1$", "^(?=(a+)+$)(a+)+b$", "(?<!b)(a*)*c"]
LIMITS = {**dict.fromkeys(LINEAR, 200_000), **dict.fromkeys(LARGE, 10_000), **dict.fromkeys(BACKTRACKING, 4_000)}


@pytest.mark.parametrize("pattern", LIMITS)
@pytest.mark.parametrize("num_characters", [3_000, 100_000, 8_000_000])
def test_a_pattern_that_backtracks_for_ever_costs_no_time(pattern: str, num_characters: int) -> None:
    """The last three look around or back, which no linear engine can: they are held against little text, and so are
    those before them, which are large.
    """
    schema = ArgumentSchema(Tool("act", "", {"properties": {"a": {"type": "string", "pattern": pattern}}}))
    arguments = {"a": "a" * num_characters + "!"}
    with soon():
        assert not schema.is_valid(arguments)
        is_too_long = num_characters > LIMITS[pattern]
        assert schema.reasons(arguments).startswith("they have texts" if is_too_long else "a: ")
    assert schema.is_valid({"b": "x"})


def test_many_texts_with_a_pattern_cost_no_more_than_four_of_the_longest() -> None:
    """17 texts of 1,000 characters are more than 4 of 4,000."""
    texts = {"properties": {"a": {"items": {"pattern": BACKTRACKING[-1]}}}}
    schema = ArgumentSchema(Tool("act", "", texts))
    for num_texts, is_valid in [(16, True), (17, False), (100_000, False)]:
        with soon():
            assert schema.is_valid({"a": ["a" * 999 + "c"] * num_texts}) is is_valid
    assert schema.is_valid({"a": ["c"]})  # a call before it leaves nothing behind
    assert schema.reasons({"a": ["a" * 999 + "c"] * 17}).startswith("they have texts")


def test_a_text_that_is_too_long_to_check_is_wrong_even_where_a_match_is_forbidden() -> None:
    schema = ArgumentSchema(Tool("act", "", {"properties": {"a": {"not": {"pattern": "^(?!b)a"}}}}))
    assert schema.is_valid({"a": "b"})
    assert not schema.is_valid({"a": "a"})
    assert not schema.is_valid({"a": "b" * 4_001})


def test_an_argument_may_have_the_name_of_a_keyword_and_a_reason_has_the_keywords_that_the_server_wrote() -> None:
    names = {name: {"type": "string", "pattern": "^(?!b)a"} for name in ("enum", "const", "pattern")}
    schema = ArgumentSchema(Tool("act", "", {"properties": names}))
    assert schema.is_valid(dict.fromkeys(names, "a"))
    assert not any(schema.is_valid({name: "b"}) for name in names)
    forbidden = ArgumentSchema(Tool("act", "", {"properties": {"a": {"not": {"pattern": "^a"}}}}))
    assert forbidden.reasons({"a": "ab"}) == 'a: {"pattern":"^a"} is not allowed for "ab"'


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def test_only_texts_that_a_pattern_applies_to_are_counted() -> None:
    """zod 4 writes this pattern for `z.email()`; the body has none. An argument may be called `pattern`."""
    mail = {"to": {"type": "string", "pattern": ZOD_EMAIL}, "body": {"type": "string"}, "pattern": {"type": "string"}}
    schema = ArgumentSchema(Tool("send_email", "", {"properties": mail, "additionalProperties": False}))
    long = "x" * 1_000_000
    assert schema.is_valid({"to": "a@b.com", "body": long, "pattern": long})
    assert not schema.is_valid({"to": "a@b..com", "body": long})
    assert schema.reasons({"to": "a@b..com", "body": long}).startswith('to: "a@b..com" does not match "^(?!')
    named = ArgumentSchema(Tool("set", "", {"patternProperties": {"^(?!x)a": {"type": "string"}}}))
    assert named.is_valid({"a": long})
    assert not named.is_valid({"a": 7})
    assert not named.is_valid({"a" * 4_001: "b"})
    assert named.reasons({"a" * 4_001: "b"}).startswith("their names have more than 4,000")


def test_a_value_with_a_pattern_in_it_is_no_pattern() -> None:
    search = {"default": {"pattern": "*.py"}, "examples": [{"pattern": "*"}], "enum": [{"pattern": "*.py"}, None]}
    schema = ArgumentSchema(Tool("grep", "", {"properties": {"search": search}}))
    assert schema.is_valid({"search": {"pattern": "*.py"}})
    assert not schema.is_valid({"search": {"pattern": "*.md"}})


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^.{1,5000}$", ["a", "é" * 5_000], ["", "a" * 5_001, "a\nb"]),
        (r"^\S{1,2000}$", ["a" * 2_000], ["", "a b", "a" * 2_001]),
        (r"^[\s\S]{0,65536}$", ["", "\n" * 65_536], ["a" * 65_537]),
        (r"^[^/\]]{2}$", ["ab"], ["a", "abc", "a/", "a]"]),
        (r"^\w{3,}$", ["abc", "a" * 100_000], ["ab", "a-c"]),
        (r"^[A-Z].{0,1999}$", ["A", "A" + "b" * 1_999], ["a", "A" + "b" * 2_000]),  # 3 MB when compiled
        (r"^\p{Lu}{2}$", ["ÄB"], ["Ä", "ab"]),
    ],
)
def test_a_bounded_repeat_is_checked_whatever_its_bound(pattern: str, right: list[str], wrong: list[str]) -> None:
    schema = ArgumentSchema(Tool("act", "", {"properties": {"a": {"pattern": pattern}}}))
    assert [schema.is_valid({"a": text}) for text in right] == [True] * len(right)
    assert [schema.is_valid({"a": text}) for text in wrong] == [False] * len(wrong)


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


def test_a_schema_with_nan_is_refused_since_no_prompt_could_be_read_with_it():
    assert "Out of range float" in refused({"properties": {"a": {"type": "number", "default": float("nan")}}})
