"""`python -m tasks registry`: the journal of promotions, and MLflow's aliases."""

from __future__ import annotations

from typing import Any

import typer

from tasks.commands.cli.options import Reason
from tasks.core.terminal import tell
from tasks.pipeline.cli_command import command

registry = typer.Typer(no_args_is_help=True)


@command(registry)
def show() -> Any:
    """The recorded champion, differences, holds and last entries.

    Status 1: something differs from the record.
    """
    lines = list(_registry().show())
    for line in lines:
        tell(line)
    return not any(line.startswith("differs: ") for line in lines)


@command(registry)
def restore() -> str:
    """Restore aliases and tags from the record."""
    return _registry().restore()


@command(registry)
def adopt(reason: Reason) -> str:
    """Change the record to what MLflow shows now."""
    return _registry().adopt(reason=reason)


@command(registry)
def release(reason: Reason) -> str:
    """Allow promotions again after `rollback --hold`."""
    return _registry().release(reason=reason)


@command(registry)
def relocate() -> str:
    """After the folder was moved: correct the paths in MLflow's database."""
    return _registry().relocate()


def _registry() -> Any:
    from tasks.commands import registry as verb

    return verb
