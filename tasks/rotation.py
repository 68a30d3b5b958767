"""The next kept test set, asked for in params.yaml: `curate.test_rotation` raised by one, and nothing else touched.

A person's comments and layout stay: the one value is replaced where the parser found it, and the text is written only
if it then says what it said before but for that value. Left out: when a test set is worn (`holdout_reuse.py`), and what
a rotation is (`splitting.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.storage import atomic_file

SECTION, OPTION = "curate", "test_rotation"


def raise_test_rotation(file: Path) -> int:
    """Raise `curate.test_rotation` in a params.yaml by one; the new value. ValueError where the text has no such one."""
    text = file.read_bytes().decode()  # with the ends of its lines
    before: dict[str, Any] = yaml.safe_load(text)
    node = _value_of(_value_of(yaml.compose(text, Loader=yaml.SafeLoader), SECTION), OPTION)
    if node is not None:
        number = int(before[SECTION][OPTION]) + 1
        changed = f"{text[: node.start_mark.index]}{number}{text[node.end_mark.index :]}"
        if _parsed(changed) == {**before, SECTION: {**before[SECTION], OPTION: number}}:
            with atomic_file(file) as temporary:
                temporary.write_bytes(changed.encode())
            return number
    raise ValueError(
        f"{file}: {SECTION}.{OPTION} could not be raised without changing more than that, and nothing was written. "
        f"Write it as a plain number under {SECTION}, or raise it by hand."
    )


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # the value had a name that is used elsewhere
        return None


def _value_of(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The node of a mapping's key; None where there is none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)
