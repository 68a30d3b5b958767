"""Made-up arguments: they fit the schema of a tool that no reference calls."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.commands.doctor import arguments
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.tools.base import Tool
from tasks.tools.schemas import ArgumentSchema

ARGUMENT: list[dict[str, Any]] = [
    {"type": "string", "minLength": 3},
    {"type": "null"},
    {"enum": ["x", "y"]},
    {"const": 4},
    {"default": 7},
    {"type": "integer", "minimum": 7, "multipleOf": 5},
    {"type": "integer", "maximum": -3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 2},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": ["null", "string"]},
    {"$ref": "#/$defs/Point"},
    {"allOf": [{"$ref": "#/$defs/Point"}, {"properties": {"y": {"type": "boolean"}}, "required": ["y"]}]},
    {"type": "object", "additionalProperties": False},
]
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


@pytest.mark.parametrize("argument", ARGUMENT, ids=str)
def test_made_up_arguments_fit_the_schema_they_are_made_from(argument: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": argument}, "required": ["a"], "$defs": {"Point": POINT}}
    made = arguments.make_up_arguments(schema)
    assert ArgumentSchema(Tool("t", "", schema)).is_valid(made), made


def test_the_arguments_of_travel_desk_can_all_be_made_up() -> None:
    for item in TravelDesk().tools:
        assert ArgumentSchema(item).is_valid(arguments.make_up_arguments(item.parameters)), item.name


def test_a_schema_that_holds_itself_comes_to_an_end() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["next"]}
    arguments.make_up_arguments({**node, "$defs": {"Node": node}})
    arguments.make_up_arguments({"$ref": "#"})
