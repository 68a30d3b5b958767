"""`python -m tasks cache`: the recorded replies of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from tasks.pipeline.cli_command import command

cache = typer.Typer(no_args_is_help=True)


@command(cache)
def freeze(
    path: Annotated[
        Path | None,
        Argument(help="The file to write. Default: environment.cache.frozen, or tool_cache.jsonl in paths.custom."),
    ] = None,
) -> list[str]:
    """Write the recorded replies to a file that DVC versions."""
    from tasks.commands import freeze_cache as verb

    return verb.freeze(path)
