"""The files of ours and what their modules are called; who imports whom is read by `tasks/core/import_graph.py`."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT


def python_files(*folders: str) -> list[Path]:
    """The files of some folders, relative to the root, in order."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    """`tasks/core/records.py` → `tasks.core.records`; a package's `__init__.py` is the package."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
