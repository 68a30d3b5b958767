"""Profiles: `infra/profiles/demo.yaml` is a whole `params.yaml`, and every other profile contains only what differs.

Applying one merges it over demo.yaml and writes the result to `params.yaml`, which is always complete. Several are
merged in order: a model and its hardware, then an environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from tasks.core.files import write_text
from tasks.core.params_text import refuse_what_dvc_cannot_read
from tasks.core.settings import PARAMS_FILE, load_paths, parse_params, read_params
from tasks.core.yaml_text import PLAIN
from tasks.pipeline.order import check_params
from tasks.pipeline.run_lock import only_run

PROFILES = Path("infra/profiles")
WHOLE = "demo"
COMMENT_COLUMN = 46
Edit = tuple[int, int, list[str]]  # the lines from the first number up to the second become these


def apply_profiles(names: Sequence[str]) -> list[str]:
    """Write the profiles to `params.yaml`, the later over the earlier, with their comments. ValueError where the result
    is invalid, or while a run is using the file.
    """
    return write_params(read_profiles(names), f"the profile {' with '.join(names)}", PROFILES / f"{names[-1]}.yaml")


def write_params(text: str, what: str, source: Path) -> list[str]:
    """Make `text`, which is `what`, the `params.yaml` of the current folder; the lines say what changed."""
    params = parse_params(text, PARAMS_FILE)
    check_params(params, source=source)
    refuse_what_dvc_cannot_read(text, source)
    with only_run(load_paths(params).artifacts):
        changed = _changed(params)
        write_text(PARAMS_FILE, text)
    return [f"{PARAMS_FILE} is now {what}", *changed]


def read_profiles(chosen: Sequence[str], folder: Path = PROFILES) -> str:
    """The text of a whole `params.yaml`: the profiles merged over demo.yaml in this order."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    for needed in (*chosen, WHOLE):
        if needed not in names:
            stem = Path(needed).name.removesuffix(".yaml")
            hint = f" Write {stem}." if stem in names else ""
            raise ValueError(
                f"{needed!r} is not a profile, so there is nothing to read. Profiles are the files of {PROFILES}: "
                f"{', '.join(names) or 'there is none; run from the project root'}.{hint}"
            )
    _refuse_two_environments(chosen, folder)
    text = _read(folder / f"{WHOLE}.yaml")
    for file in (folder / f"{name}.yaml" for name in chosen if name != WHOLE):
        text = merge(text, _read(file), source=file)
    return text


def _refuse_two_environments(chosen: Sequence[str], folder: Path) -> None:
    """Their problems, tools and limits would be mixed."""
    overlays = {name: read_params(folder / f"{name}.yaml") for name in chosen if name != WHOLE}
    found = [name for name, values in overlays.items() if (values.get("environment") or {}).get("name")]
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} are two environments, and a run has one. Choose one of them, beside a model's "
            f"profile."
        )


def merge(whole: str, overlay: str, *, source: Path) -> str:
    """`whole` with the lines of `overlay` in place of its own. A changed line without a comment keeps the old one."""
    expected = merge_values(parse_params(whole, source), parse_params(overlay, source))
    lines = whole.splitlines()
    for first, end, new in sorted(_edits(_mapping(whole), _mapping(overlay), lines, overlay), reverse=True):
        lines[first:end] = new
    text = "\n".join([*_head(overlay), *lines, ""])
    if parse_params(text, source) != expected:
        raise ValueError(
            f"{source}: its YAML has a form that cannot be merged. Write one key per line, as in {WHOLE}.yaml."
        )
    return text


def _read(file: Path) -> str:
    read_params(file)  # gives one line for invalid YAML
    return file.read_text(encoding="utf-8")


def _mapping(text: str) -> yaml.MappingNode:
    node = PLAIN.compose(text)
    assert isinstance(node, yaml.MappingNode)
    return node


def merge_values(whole: Any, overlay: Any) -> Any:
    if not isinstance(whole, dict) or not isinstance(overlay, dict):
        return overlay
    return {**whole, **{name: merge_values(whole.get(name), value) for name, value in overlay.items()}}


def _head(overlay: str) -> list[str]:
    head = list(takewhile(lambda line: line.startswith("#"), overlay.splitlines()))
    return [*head, "#"] if head else []


def _edits(whole: yaml.MappingNode, overlay: yaml.MappingNode, lines: list[str], overlay_text: str) -> Iterator[Edit]:
    """What to change in the lines of `whole`, key by key; a new key goes to the end of its section."""
    known = {key.value: (key, value) for key, value in whole.value}
    for key, value in overlay.value:
        old_key, old_value = known.get(key.value, (None, None))
        new = _lines_of(key, value, overlay_text, whole.start_mark.column, is_block=not overlay.flow_style)
        if old_key is None or old_value is None:
            yield (end := _last_line(whole) + 1), end, new
        elif isinstance(value, yaml.MappingNode) and isinstance(old_value, yaml.MappingNode):
            if not value.flow_style and " #" in new[0]:
                yield old_key.start_mark.line, old_key.start_mark.line + 1, new[:1]
            yield from _edits(old_value, value, lines, overlay_text)
        else:
            yield _with_comment(old_key.start_mark.line, _last_line(old_value), new, lines)


def _lines_of(key: yaml.Node, value: yaml.Node, text: str, indent: int, *, is_block: bool) -> list[str]:
    """The lines of one key and its value, with comments, moved to this column."""
    if not is_block:
        return [" " * indent + text[key.start_mark.index : value.end_mark.index]]
    lines = text.splitlines()[key.start_mark.line : _last_line(value) + 1]
    column = key.start_mark.column
    return [" " * indent + line[column:] if line.strip() else line for line in lines]


def _with_comment(first: int, last: int, new: list[str], lines: list[str]) -> Edit:
    """The edit of the lines from `first` to `last`; one line without a comment keeps the old line's."""
    old = lines[first]
    if len(new) == 1 and " #" in old and " #" not in new[0]:
        new = [f"{new[0]:<{COMMENT_COLUMN - 1}} {old[old.index(' #') + 1 :]}"]
    return first, last + 1, new


def _last_line(node: yaml.Node) -> int:
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line) - (node.end_mark.column == 0)


def _changed(params: dict[str, Any]) -> list[str]:
    """The difference to the present params.yaml; nothing of an invalid one, which may contain a secret."""
    if not PARAMS_FILE.exists():
        return difference({}, params)
    before = read_params()
    try:
        check_params(before)
    except ValueError:
        return [f"  the {PARAMS_FILE} before this was not valid, so it is not compared"]
    return difference(before, params) or ["no value changed"]


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line per value that differs: `train.num_iterations: 80 → 4`."""
    old, new = dict(_values(before)), dict(_values(after))
    return [
        f"  {key}: {_shown(new[key])} (new)"
        if key not in old
        else f"  {key}: {_shown(old[key])} (removed)"
        if key not in new
        else f"  {key}: {_shown(old[key])} → {_shown(new[key])}"
        for key in {**old, **new}
        if key not in old or key not in new or old[key] != new[key]
    ]


def _shown(value: Any) -> str:
    """As YAML writes it: null, true, [1, 2]."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _values(params: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
