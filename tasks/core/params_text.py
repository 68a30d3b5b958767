"""params.yaml as text: YAML as DVC reads it, and one number changed with the rest of the file as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.core.files import atomic_file
from tasks.core.yaml_text import PLAIN, Dialect

# YAML 1.2, as DVC reads params.yaml and writes dvc.lock: `off` is a text, and 1e-05 a number.
SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
OF_DVC = Dialect(
    resolvers=[(tag, re.compile(f"^(?:{pattern})$"), list(first)) for tag, pattern, first in SCALARS], only=True
)


def read_as_dvc(text: str | bytes) -> Any:
    return OF_DVC.load(text)


def refuse_what_dvc_cannot_read(text: str, source: Path) -> None:
    """ValueError where DVC, which starts the stages, would call the file corrupted: its parser takes no bare colon
    within braces or brackets, as in `{checker: tasks.custom.mine:check}`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        YAML(typ="safe").load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(
            f"{source}: DVC cannot read line {line} ({error.problem}), so no stage would start. Within {{…}} and […] "
            f'a text with a colon needs quotes: "tasks.custom.mine:check".'
        ) from None


def set_number(file: Path, place: tuple[str, ...], number: int) -> bool:
    """Write `number` at `place`, such as ("curate", "test_rotation"); comments and the rest stay. False, with nothing
    written, where the text has no such value or more would change.
    """
    text = file.read_bytes().decode()  # keeps line ends
    node = PLAIN.compose(text)
    for key in place:
        node = _value_of(node, key)
    if node is None:
        return False
    changed = f"{text[: node.start_mark.index]}{number}{text[node.end_mark.index :]}"
    if _parse(changed) != _with(PLAIN.load(text), place, number):
        return False
    with atomic_file(file) as temporary:
        temporary.write_bytes(changed.encode())
    return True


def _value_of(node: yaml.Node | None, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _with(values: Mapping[str, Any], place: tuple[str, ...], number: int) -> dict[str, Any]:
    key, rest = place[0], place[1:]
    return {**values, key: _with(values[key], rest, number) if rest else number}


def _parse(text: str) -> Any:
    try:
        return PLAIN.load(text)
    except yaml.YAMLError:  # the value had an anchor that is used elsewhere
        return None
