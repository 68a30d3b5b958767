"""The files of ours, what their modules are called and what they call; who imports whom is read by
`tasks/core/import_graph.py`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.conftest import ROOT


def python_files(*folders: str) -> list[Path]:
    """The files of some folders, relative to the root, in order."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    """`tasks/core/records.py` → `tasks.core.records`; a package's `__init__.py` is the package."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """The calls and imports of a file, read once for all tests of a worker."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Import | ast.ImportFrom))


def dotted(node: ast.expr) -> str:
    """`sys.stdout.write` for a chain of names, as `ast.unparse` gives it but at once; "" for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""
