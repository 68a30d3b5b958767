"""YAML is read by libyaml for its speed; what it gives and refuses is what PyYAML's own parser does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.params_text import OF_DVC
from tasks.core.settings import PARAMS, parse_params
from tasks.core.yaml_text import PLAIN, Dialect
from tests.conftest import ROOT

DIALECTS = [PLAIN, PARAMS, OF_DVC]
FILES = [ROOT / "params.yaml", ROOT / "dvc.yaml", ROOT / "dvc.lock", *sorted((ROOT / "infra/profiles").glob("*.yaml"))]
LINES = (ROOT / "params.yaml").read_text(encoding="utf-8").splitlines()
PIECES = [
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&a ",
    "*a",
    "!!int ",
    "!x ",
    "! ",
    "2024-13-45",
    "|",
    "> ",
    "#",
    " #",
    "'",
    '"',
    "%",
    "@",
]
PIECES += ["1e-5", "0x1", "1_0", "12:30", "yes", "~", "---", "...", "<<: ", "\\", "=", "a: b", "`", "\n", "\n  "]
PIECES += ["! ", "2024-13-45", "\t", "\ufeff", "\u2028", "\x85", "\x00", "é"]
WRITTEN = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
EDITED = st.builds(
    lambda first, count, at, piece: piece.join(split_at("\n".join(LINES[first : first + count]), at)),
    st.integers(0, len(LINES) - 1),
    st.integers(1, 12),
    st.integers(0, 400),
    st.sampled_from(PIECES),
)


def split_at(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]


def by_pyyaml(dialect: Dialect, text: str) -> Any:
    return yaml.load(text, Loader=dialect._slow)


def test_libyaml_is_there_and_one_file_reads_yaml():
    assert yaml.__with_libyaml__
    files = [file for folder in ("tasks", "flows") for file in (ROOT / folder).rglob("*.py")]
    reading = [file.name for file in files if re.search(r"\byaml\.(safe_)?(load|compose)", file.read_text("utf-8"))]
    assert reading == ["yaml_text.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.parametrize("dialect", DIALECTS, ids=["plain", "params", "dvc"])
def test_our_files_have_the_values_that_pyyaml_finds(dialect: Dialect, file: Path):
    text = file.read_text(encoding="utf-8")
    assert dialect.load(text) == dialect.load(text.encode()) == by_pyyaml(dialect, text)


def places(node: yaml.Node) -> Iterator[tuple[int, int, int, int]]:
    """Of every key and value: line and column, and in characters where a scalar begins and ends."""
    mark, end = node.start_mark, node.end_mark
    yield mark.line, mark.column, mark.index, end.index if isinstance(node, yaml.ScalarNode) else -1
    children = node.value if isinstance(node, yaml.CollectionNode) else []
    for child in chain.from_iterable(item if isinstance(item, tuple) else (item,) for item in children):
        yield from places(child)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_values_have_the_places_that_pyyaml_finds_also_after_letters_of_several_bytes(file: Path):
    text = f"τé😀: [1, {{a: b}}]\n{file.read_text(encoding='utf-8')}"
    expected: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    assert [*places(PLAIN.compose(text))] == [*places(expected)]


@given(text=WRITTEN | EDITED, dialect=st.sampled_from(DIALECTS))
def test_a_text_that_both_parsers_read_has_one_value(text: str, dialect: Dialect):
    try:
        expected = by_pyyaml(dialect, text)
    except Exception:
        return
    if not {"[...]", "{...}"} & {*re.findall(r"\[\.{3}]|{\.{3}}", repr(expected))}:  # it does not contain itself
        assert repr(dialect.load(text)) == repr(expected)


TEN = ", ".join(["*{}"] * 10)
BOMBS = {  # a kilobyte each, and ten to the ninth values; or endless ones
    "lists": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{TEN.replace('{}', f'a{n - 1}')}]\n" for n in range(1, 10)),
    "tables": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(10))}}}\n" for n in range(1, 10)),
    "merged tables": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{TEN.replace('{}', f'a{n - 1}')}]}}\n" for n in range(1, 10)),
    "itself": "a: &a [*a]",
    "itself in a table": "a: &a {b: *a}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_page_of_aliases_is_refused_at_once_and_a_few_are_what_they_stand_for(kind: str):
    with pytest.raises(
        ValueError, match=r"^params.yaml: not valid YAML \(its aliases stand for more than 100,000"
    ) as told:
        parse_params(BOMBS[kind], Path("params.yaml"))
    assert "\n" not in str(told.value)
    assert parse_params("a: &a [1, 2]\nb: [*a, *a]", Path("params.yaml")) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("text", ["seed: [1", "a: 1\na: 2", "a:\n  b: 1\n c: 2", "\x00", "a: b: c"])
def test_a_mistake_is_told_in_pyyamls_words(text: str):
    with pytest.raises(yaml.YAMLError) as expected:
        by_pyyaml(PARAMS, text)
    with pytest.raises(yaml.YAMLError) as told:
        PARAMS.load(text)
    assert str(told.value) == str(expected.value)


@pytest.mark.parametrize("text", ["seed: !!int ''", "seed: !!int", "seed: !!int abc", "seed: !!timestamp x"])
def test_a_tag_before_something_else_is_invalid_yaml(text: str):
    with pytest.raises(ValueError, match=r"^params.yaml: not valid YAML \(a value is not what its tag says"):
        parse_params(text, Path("params.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["'[' * 10**5", "'- ' * 10**5", "'{a: ' * 10**5", "'? ' * 10**5"])
def test_lists_nested_deeper_than_libyaml_can_do_not_crash_the_process(opened: str):
    code = f"from tasks.core.yaml_text import PLAIN\ntry: PLAIN.load({opened})\nexcept RecursionError: print('refused')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n")
