"""A call made up from a JSON Schema, for tools that no reference uses; the caller validates the result.

Patterns and references outside the schema are not solved. A schema may ask for a billion items; at most MAX_VALUES are
made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

DEEPEST = 16  # levels, for a schema that contains itself
MAX_VALUES, MAX_CHARACTERS = 1000, 10_000
TEXTS = {
    "date": "2024-01-31", "time": "12:00:00Z", "date-time": "2024-01-31T12:00:00Z", "duration": "P1D",
    "email": "someone@example.org", "hostname": "example.org", "uri": "https://example.org", "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1", "uuid": "00000000-0000-4000-8000-000000000000",
}  # fmt: skip


@dataclass(slots=True)
class _Source:
    root: Mapping[str, Any]
    num_values: int = 0


def make_up_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that should fit the schema: only required ones, shortest texts, smallest numbers."""
    value = _value(schema, _Source(schema), 0)
    return value if isinstance(value, dict) else {}


def _value(schema: Any, source: _Source, depth: int) -> Any:
    source.num_values += 1
    if not isinstance(schema, Mapping) or depth > DEEPEST or source.num_values > MAX_VALUES:
        return "a"
    schema = _resolve(schema, source.root, depth)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    kind = _kind(schema)
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _value(properties.get(name, {}), source, depth + 1) for name in schema.get("required", [])}
    if kind == "array":
        items = [_value(item, source, depth + 1) for item in schema.get("prefixItems", [])]
        more = max(0, min(schema.get("minItems", 0), MAX_VALUES - source.num_values) - len(items))
        return [*items, *(_value(schema.get("items", {}), source, depth + 1) for _ in range(more))]
    if kind in ("integer", "number"):
        return _number(schema, kind)
    text = TEXTS.get(schema.get("format", ""), "a")
    least = min(schema.get("minLength", 0), MAX_CHARACTERS)
    return {"boolean": True, "null": None}.get(kind, text if len(text) >= least else "a" * least)


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """The schema with its references within the document followed, all of `allOf`, and the first of a choice."""
    if depth > DEEPEST:
        return {}
    choice = next((key for key in ("anyOf", "oneOf") if schema.get(key)), None)
    parts = [*schema.get("allOf", []), *(schema[choice][:1] if choice else [])]
    reference: Any = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target: Any = root
        for name in reference.split("/")[1:]:
            target = target[name.replace("~1", "/").replace("~0", "~")]
        parts.append(target)
    merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", choice)}
    for part in parts:
        part = _resolve(part, root, depth + 1)
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", []), *part.get("required", [])]
        merged = {**merged, **part} | ({"properties": properties, "required": required} if properties else {})
    return merged


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((str(item) for item in kind if item != "null"), "null")
    return str(kind or ("object" if "properties" in schema else "array" if "items" in schema else "string"))


def _number(schema: Mapping[str, Any], kind: str) -> float | int:
    step, below, above = schema.get("multipleOf", 1), schema.get("exclusiveMinimum", -inf), inf
    above = schema.get("exclusiveMaximum", above)
    low = schema.get("minimum", schema.get("exclusiveMinimum", min(1, schema.get("maximum", 1))))
    value = -(-low // step) * step
    value += step if value <= below else 0
    if value >= above:
        value = (low + above) / 2
    return int(value) if kind == "integer" or value == int(value) else value
