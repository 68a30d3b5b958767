"""The next kept test set, asked for in params.yaml: `curate.test_rotation` one higher, and nothing else touched.

A person's comments and layout stay: the one value is replaced where the parser found it, and the text is written only
if it then says what it said before but for that value. Left out: when a test set is worn (`holdout_reuse.py`), and what
a rotation is (`splitting.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.core.files import atomic_file

SECTION, OPTION = "curate", "test_rotation"


def raise_test_rotation(file: Path, *, curated: int) -> int:
    """Ask for the test set after the one that was `curated` in a params.yaml; its number.

    ValueError where no further one is kept, or the text has no such value. A file that asks for a later one than was
    curated stays as it is.
    """
    text = file.read_bytes().decode()  # with the ends of its lines
    before: dict[str, Any] = yaml.safe_load(text)
    options = before.get(SECTION) or {}
    if options.get(OPTION, 0) > curated:
        return int(options[OPTION])
    if curated + 1 >= options.get("num_test_sets", 1):
        raise ValueError(
            f"The test problems are worn, and no further test set is kept ({SECTION}.num_test_sets: "
            f"{options.get('num_test_sets', 1)}). Bring problems of new split groups to {SECTION}.source, or set "
            f"promote.on_holdout_reuse to warn and decide on worn ones."
        )
    node = _value_of(_value_of(yaml.compose(text, Loader=yaml.SafeLoader), SECTION), OPTION)
    if node is not None:
        changed = f"{text[: node.start_mark.index]}{curated + 1}{text[node.end_mark.index :]}"
        if _parsed(changed) == {**before, SECTION: {**options, OPTION: curated + 1}}:
            with atomic_file(file) as temporary:
                temporary.write_bytes(changed.encode())
            return curated + 1
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
