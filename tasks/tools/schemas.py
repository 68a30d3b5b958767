"""The JSON Schema of a tool's arguments, compiled once: whether a call is valid, and if not, why.

A schema comes from a server and may be hostile: references that double, patterns that backtrack, endless nesting. So it
is measured first, references followed; patterns have limits of their own (`patterns.py`); nothing is fetched; and
errors are worded only if that is cheap: they double per level of a recursive schema (at 18 levels, wording took 50 s).
Left out: output schemas, which the model never reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.core import json_text
from tasks.core.text import one_line
from tasks.tools.base import Tool
from tasks.tools.patterns import (
    AS_THEY_ARE,
    DEFINITIONS,
    KEYWORD,
    MAX_BACKTRACKED,
    MAX_BACKTRACKS,
    MAX_MATCHED,
    MAX_PATTERN_BYTES,
    NAMED,
    PatternKeyword,
    bounded_matching,
    with_keyword,
)

MAX_SCHEMA_BYTES = 1 << 18
MAX_EXPANDED = 20_000  # parts of a schema, references followed
MAX_WORDING = 100_000  # errors to word; each takes 70 µs
MAX_REASONS, MAX_REASON_CHARACTERS = 3, 160
ASIDE = (*DEFINITIONS, *AS_THEY_ARE, "default", "examples")  # used only by reference, or never
REFERENCES, ANCHORS = ("$ref", "$dynamicRef", "$recursiveRef"), ("$anchor", "$dynamicAnchor")


class ArgumentSchema:
    """The compiled schema of one tool; ValueError if it is invalid or too large."""

    def __init__(self, tool: Tool):
        import jsonschema_rs

        try:
            self.size = SchemaSize(tool.parameters)
            self.max_name_characters, self._schema = _compiled(with_keyword(tool.parameters))
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise ValueError(
                f"tool {tool.name!r}: the schema of its arguments is not usable ({_in_words(error)}), so no call "
                f"could be checked. Correct the schema where the tool is defined, or leave the tool out."
            ) from None

    def is_valid(self, arguments: Mapping[str, Any]) -> bool:
        if self.max_name_characters is not None and Extent.of(arguments).num_name_characters > self.max_name_characters:
            return False
        try:
            with bounded_matching() as matching:
                return bool(self._schema.is_valid(arguments)) and not matching.limit
        except ValueError:  # half a surrogate pair, or a key that is not text
            return False

    def reasons(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong, in a few short phrases."""
        extent = Extent.of(arguments)
        if self.max_name_characters is not None and extent.num_name_characters > self.max_name_characters:
            return (
                f"their names have more than {self.max_name_characters:,} characters, too many to hold against patterns"
            )
        if self.size.wording_cost(extent) > MAX_WORDING:
            return "they do not fit the tool's schema, and are too many or nested too deep to say where"
        try:
            with bounded_matching() as matching:
                errors = list(self._schema.iter_errors(arguments))
        except ValueError:
            return "they hold what JSON cannot"
        if matching.limit:
            return f"they have texts with patterns of more than {matching.limit:,} characters, too many to check"
        faults = [(error.instance_path, error.message.replace(KEYWORD, "pattern")) for error in errors[:MAX_REASONS]]
        return spell_faults(faults, num_faults=len(errors))


class SchemaSize:
    """The size of a schema: `num_parts` with every reference followed; a part that refers back to itself counts once.

    ValueError if it exceeds the limits above or refers to something outside it.
    """

    def __init__(self, schema: Mapping[str, Any]):
        json_text.check_depth(dict(schema))
        num_bytes = len(json.dumps(dict(schema), allow_nan=False))  # the prompt has it, and nobody could read NaN
        if num_bytes > MAX_SCHEMA_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes, more than the limit of {MAX_SCHEMA_BYTES:,}")
        self.is_recursive = False
        self._whole = schema
        self._anchors = dict(_anchors(schema))
        self._sizes: dict[int, int | None] = {}  # by identity; None while it is being measured
        self.num_parts = self._size(schema)
        if self.num_parts > MAX_EXPANDED:
            raise ValueError(
                f"its references lead to {_about(self.num_parts)} parts, more than the limit of {MAX_EXPANDED:,}"
            )

    def wording_cost(self, extent: Extent) -> int:
        """How many errors wording could produce for arguments of that extent."""
        return int(self.num_parts**extent.depth if self.is_recursive else self.num_parts * extent.num_values)

    def _size(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) in self._sizes:
            known = self._sizes[id(schema)]
            self.is_recursive = self.is_recursive or known is None
            return 1 if known is None else known
        self._sizes[id(schema)] = None
        total = 1 + sum(map(self._size, self._parts(schema)))
        self._sizes[id(schema)] = total
        return total

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for keyword, value in schema.items():
            if keyword in REFERENCES and isinstance(value, str):
                yield self._target(value)
            elif keyword in NAMED and isinstance(value, Mapping):
                yield from value.values()
            elif keyword in ASIDE:
                continue
            elif isinstance(value, Mapping):
                yield value
            elif isinstance(value, list):
                yield from value

    def _target(self, reference: str) -> Any:
        if reference in self._anchors:
            return self._anchors[reference]
        place: Any = self._whole
        if reference not in ("#", "#/"):
            if not reference.startswith("#/"):
                raise ValueError(f"it refers to {one_line(repr(reference), MAX_REASON_CHARACTERS)}, which is not in it")
            for step in reference[2:].split("/"):
                place = _step(place, step, reference)
        return place


def _step(place: Any, step: str, reference: str) -> Any:
    from urllib.parse import unquote

    name = unquote(step).replace("~1", "/").replace("~0", "~")
    if isinstance(place, Mapping) and name in place:
        return place[name]
    if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
        return place[int(name)]
    raise ValueError(f"it refers to {one_line(repr(reference), MAX_REASON_CHARACTERS)}, which is not in it")


def _anchors(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What each `#name` refers to. ValueError if a part has its own `$id`, to which references would be relative."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$id"), str) and part is not schema:
                raise ValueError("a part of it has an $id of its own")
            yield from ((f"#{part[name]}", part) for name in ANCHORS if isinstance(part.get(name), str))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a value: number of values, itself included; levels; characters of all names of arguments."""

    num_values: int
    depth: int
    num_name_characters: int

    @classmethod
    def of(cls, value: Any) -> Extent:
        num_values, depth, num_name_characters, level = 0, 0, 0, [value]
        while level:
            num_values, depth = num_values + len(level), depth + 1
            maps = [item for item in level if isinstance(item, Mapping)]
            num_name_characters += sum(len(key) for item in maps for key in item if isinstance(key, str))
            lists = [item for item in level if isinstance(item, list)]
            level = [inner for item in maps for inner in item.values()] + [inner for item in lists for inner in item]
        return cls(num_values, depth, num_name_characters)


def _compiled(schema: dict[str, Any]) -> tuple[int | None, Any]:
    """(most characters of the names in a call, or None without `patternProperties`; compiled schema). Names whose
    patterns no linear engine can run get a backtracking engine and a lower limit.
    """
    import jsonschema_rs

    sizes = {"size_limit": MAX_PATTERN_BYTES, "dfa_size_limit": MAX_PATTERN_BYTES}
    compiled = partial(jsonschema_rs.validator_for, schema, offline=True, keywords={KEYWORD: PatternKeyword})
    text = json.dumps(schema)
    try:
        validator = compiled(pattern_options=jsonschema_rs.RegexOptions(**sizes))
        return (MAX_MATCHED if '"patternProperties' in text else None), validator
    except jsonschema_rs.ValidationError:
        if '"pattern": "' in text:  # in a value that something refers to as a schema, where it is held against any text
            raise
        backtracking = jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS, **sizes)
        return MAX_BACKTRACKED, compiled(pattern_options=backtracking)


def _in_words(error: Exception) -> str:
    """Of a pattern that is refused our words alone, without the engine's around them."""
    return one_line(str(error).partition("ValueError: ")[2].partition("\n")[0] or error)


def _about(number: int) -> str:
    return f"{number:,}" if number < 10**9 else "more than a billion"


def spell_faults(faults: Iterable[tuple[Iterable[Any], str]], *, num_faults: int) -> str:
    """What is wrong with arguments, of which `faults` (place, message) are the first few."""
    phrases = [
        _phrase(".".join(map(str, place)), one_line(message, MAX_REASON_CHARACTERS)) for place, message in faults
    ]
    more = [f"and {num_faults - len(phrases)} more"] if num_faults > len(phrases) else []
    return "; ".join([*phrases, *more])


def _phrase(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message
