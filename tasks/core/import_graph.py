"""Which of our modules a file imports, read from the source, imports inside functions included. The code that a result
depends on is the closure of these. Left out: imports under `if TYPE_CHECKING:`, which never run, and imports by name at
run time (environments, engines), which the caller adds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the running code, not the working directory
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")  # of a statement, in which others are


@dataclass(frozen=True, slots=True)
class Import:
    """An imported module and its line."""

    name: str
    line: int


@cache
def module_file(name: str) -> Path | None:
    """The file of our module, relative to the root; None for others."""
    stem = Path(*name.split("."))
    return next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if (ROOT / file).is_file()), None)


def python_files(folder: Path) -> list[Path]:
    """The Python files below a folder, relative to the root, sorted."""
    return sorted(file.relative_to(ROOT) for file in (ROOT / folder).rglob("*.py") if file.is_file())


@cache
def imports(file: Path) -> tuple[Import, ...]:
    """The modules that a file's code imports; none if it does not parse, such as a user's draft, which cannot run."""
    try:
        tree = ast.parse((ROOT / file).read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # ValueError: null bytes
        return ()
    return imports_of(tree, package=".".join(file.parent.parts))


def imports_of(tree: ast.AST, *, package: str = "") -> tuple[Import, ...]:
    """`package` is the one of the file, from which relative imports start."""
    return tuple(found for node in _running_code(tree) for found in imported(node, package=package))


def _running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below, except bodies of `if TYPE_CHECKING:`. No expression contains an import."""
    blocks: tuple[str, ...] = BLOCKS
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        blocks = ("orelse",)
    for block in blocks:
        for child in getattr(node, block, ()):
            yield child
            yield from _running_code(child)


def imported(node: ast.AST, *, package: str = "") -> Iterator[Import]:
    """`from tasks.tools import layer` imports the package and, where it is a module, `tasks.tools.layer`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        module = _absolute(node, package)
        if module is None:
            return
        yield Import(module, node.lineno)
        for alias in node.names:
            if module_file(f"{module}.{alias.name}"):
                yield Import(f"{module}.{alias.name}", node.lineno)


def _absolute(node: ast.ImportFrom, package: str) -> str | None:
    """The module of `from … import`: two dots in tasks.custom are tasks. None above the top, where Python fails too."""
    if node.level == 0:
        return node.module
    parents = package.split(".") if package else []
    if node.level > len(parents):
        return None
    return ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])


def closure(files: Iterable[Path], *, without: Callable[[Path], bool] = lambda file: False) -> set[Path]:
    """The files and all files of ours that they import, transitively, except those that `without` excludes."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file in found or without(file):
            continue
        found.add(file)
        targets = (module_file(item.name) for item in imports(file))
        waiting += [target for target in targets if target is not None]
    return found
