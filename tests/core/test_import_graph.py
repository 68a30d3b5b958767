"""The import graph of a user's code in tasks/custom, which may be written in any way and be half done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core import import_graph
from tasks.core.import_graph import closure, imports, module_file, python_files

CUSTOM = Path("tasks/custom")


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """tasks/custom of another root, where a module tools is ours."""
    monkeypatch.setattr(import_graph, "ROOT", tmp_path)
    _forget()
    (tmp_path / CUSTOM / "parts").mkdir(parents=True)
    (tmp_path / "tasks/tools.py").touch()
    yield tmp_path / CUSTOM
    _forget()


def _forget() -> None:
    imports.cache_clear()
    module_file.cache_clear()


def test_a_relative_import_leads_to_the_module_it_names(custom: Path) -> None:
    (custom / "shop.py").write_text("from . import prices\nfrom .parts.shelf import Shelf\nfrom .. import tools\n")
    (custom / "prices.py").touch()
    (custom / "parts/__init__.py").write_text("from . import shelf\n")
    (custom / "parts/shelf.py").write_text("from ..prices import of\nfrom .... import beyond_the_top\n")
    found = closure([CUSTOM / "shop.py"])
    assert found == {CUSTOM / "shop.py", CUSTOM / "prices.py", CUSTOM / "parts/shelf.py", Path("tasks/tools.py")}
    assert [item.name for item in imports(CUSTOM / "parts/__init__.py")] == [
        "tasks.custom.parts", "tasks.custom.parts.shelf",
    ]  # fmt: skip


@pytest.mark.parametrize("draft", [b"def half(", b"\0", b"# \xe9\n", b"(" * 10_000])
def test_a_draft_that_does_not_parse_is_in_the_graph_and_imports_nothing(custom: Path, draft: bytes) -> None:
    (custom / "draft.py").write_bytes(draft)
    (custom / ".#draft.py").symlink_to("an-editors-lock")
    assert closure(python_files(CUSTOM)) == {CUSTOM / "draft.py"}
