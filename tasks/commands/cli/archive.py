"""`backup` and `restore` of the registry that is a file of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tasks.pipeline.cli_command import command

archives = typer.Typer()


@command(archives)
def backup(
    file: Annotated[Path, Argument(metavar="FILE", help="A .tar; an older backup is replaced.")],
) -> Iterator[str]:
    """Write the registry to a file."""
    from tasks.commands import archive as verb

    return verb.backup(file)


@command(archives)
def restore(
    file: Annotated[Path, Argument(metavar="FILE", help="What backup wrote.")],
    force: Annotated[bool, Option("--force", help="Replace also a newer or another registry.")] = False,
) -> Iterator[str]:
    """Take the registry from a backup."""
    from tasks.commands import archive as verb

    return verb.restore(file, force=force)
