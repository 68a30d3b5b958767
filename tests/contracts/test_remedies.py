"""No message tells a person to delete a database: what seems damaged may be all there is of it, so it moves aside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

DELETES = re.compile(
    r"\brm -|\bunlink\b|\b(delete|remove|erase|drop)\b (\S+ ){0,3}(database|registry|table|\S*\.db\b)",
    re.IGNORECASE,
)
# Each of those has one of these words, wherever its text is broken: what has none need not be parsed.
WORDS = re.compile(r"\b(rm|unlink|delete|remove|erase|drop)\b", re.IGNORECASE)
# Results of an ablation that another recipe made; they can be made again.
ALLOWED = {"tasks/core/kept_files.py"}


def messages(source: str) -> Iterator[str]:
    """Every text of a module but its docstrings; what an f-string fills in is left out."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docstrings | inside):
            yield node.value


@pytest.mark.slow
def test_no_message_says_to_delete_a_database():
    files = [path.relative_to(ROOT) for room in ("tasks", "flows", "infra") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 300
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files if str(file) not in ALLOWED}
    found = {
        f"{file}: {text[:200]}"
        for file, source in sources.items()
        if WORDS.search(source)
        for text in messages(source)
        if DELETES.search(text)
    }
    assert not found


@pytest.mark.parametrize(
    "text", ["Remove it with `rm -f X`", "delete its MLflow database (X)", "Remove X/prefect.db", "drop the registry"]
)
def test_such_a_message_is_found(text: str):
    assert any(map(DELETES.search, messages(f'raise ValueError(f"{text}")')))


def test_docstrings_are_no_messages():
    assert list(messages('"""rm -f"""\nx = "said"')) == ["said"]
