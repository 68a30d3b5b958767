"""`python -m tasks workspace`: folders for several agents of one installation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tasks.pipeline.cli_command import command

workspace = typer.Typer(no_args_is_help=True)


@command(workspace)
def new(
    folder: Annotated[Path, Argument(metavar="DIR", help="Made where it is missing.")],
    profile: Annotated[list[str] | None, Option(metavar="NAME", help="Of infra/profiles; repeat for more.")] = None,
    model: Annotated[str | None, Option(metavar="NAME", help="Its promote.model_name and tracking.experiment.")] = None,
) -> Iterator[str]:
    """Make a workspace, or link one to this installation's code again."""
    from tasks.commands import workspace as verb

    return verb.new(folder, profile or [], model)
