"""Everything people read at a terminal passes core/terminal.py or console.py, so nothing foreign can act there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.core.import_graph import imports
from tests.contracts.import_graph import dotted, nodes, python_files

EDGE = {Path("tasks/core/terminal.py"), Path("tasks/core/console.py")}
FILES = [file for file in python_files("tasks", "flows") if file not in EDGE]


def printing(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that write to a terminal by another way."""
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in (
            *("print", "typer.echo", "typer.secho", "Console", "rich.print"),
            *("sys.stdout.write", "sys.stderr.write"),
        ):
            yield node.lineno


def test_no_module_prints_but_the_edge():
    assert not [f"{file}:{line}" for file in FILES for line in printing(nodes(file))]


def test_no_module_makes_a_console_of_its_own_or_writes_markup():
    makers = {"rich.console.Console", "rich.markup", "rich.markup.escape", "rich.print"}
    assert not [f"{file}:{item.line}" for file in FILES for item in imports(file) if item.name in makers]


def test_the_walk_sees_a_print():
    source = (
        "def run():\n    print('x', flush=True)\n    typer.echo('x')\n    sys.stderr.write('x')\n    run().print('x')\n"
    )
    assert list(printing(ast.walk(ast.parse(source)))) == [2, 3, 4]
