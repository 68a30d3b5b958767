"""Types for values that a format writes as bare text (Qwen3-Coder, GLM): `5` is a number or text by the tool's schema.

Schemas come from tools, some of them other people's, so how much of one is read is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.core import json_text
from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call

EVERY_KIND = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
AS_PYTHON = {"True": True, "False": False, "None": None}  # some templates write these three as Python does
MAX_ALTERNATIVES = 100  # schemas within one parameter's


def type_arguments(calls: Sequence[ToolCall | None], tools: Sequence[dict[str, Any]]) -> list[ToolCall | None]:
    """The calls with each text as a value that its parameter's schema allows, or as text where none fits."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools} if calls else {}
    return [call and _type_call(call, _as_table(schemas.get(call.name))) for call in calls]


def _type_call(call: ToolCall, schema: dict[str, Any]) -> ToolCall | None:
    properties = _as_table(schema.get("properties"))
    arguments = {
        name: read_bare(text, _kinds(properties.get(name, {}), schema)) for name, text in call.arguments.items()
    }
    return as_call({"name": call.name, "arguments": arguments})


def _as_table(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


def read_bare(text: str, kinds: frozenset[str]) -> Any:
    """What the text says as one of `kinds` of JSON; a text that may be a string is one unless it says another kind."""
    if kinds == {"string"}:
        return text
    try:
        value = AS_PYTHON[text.strip()] if text.strip() in AS_PYTHON else json_text.parse(text)
    except ValueError:
        return text
    fits = _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds)
    return text if "string" in kinds and (isinstance(value, str) or not fits) else value


def _kinds(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The kinds of JSON that a schema allows; every kind where it does not say, or too much to read."""
    kinds, waiting = set[str](), [schema]
    for _ in range(MAX_ALTERNATIVES):
        if not waiting:
            return frozenset(kinds)
        found = _step(waiting.pop(), root)
        if found is None:
            return EVERY_KIND
        kinds |= found[0]
        waiting += found[1]
    return EVERY_KIND


def _step(schema: Any, root: dict[str, Any]) -> tuple[set[str], list[Any]] | None:
    """(kinds that the schema names, schemas that it refers to); None where it says neither."""
    if not isinstance(schema, dict):
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return set(), [_definition(reference, root)]
    if isinstance(named := schema.get("type"), str | list):
        return {kind for kind in ([named] if isinstance(named, str) else named) if isinstance(kind, str)}, []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return set(map(_kind, values)), []
    alternatives = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)), None)
    return (set(), alternatives) if isinstance(alternatives, list) else None


def _definition(reference: str, root: dict[str, Any]) -> Any:
    """The schema at `#/$defs/NAME` of the tool's parameters."""
    place: Any = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
