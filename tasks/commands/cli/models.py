"""Registered models: where they came from, their files, and which of them is the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tasks.commands.cli.options import Reason
from tasks.pipeline.cli_command import command

models = typer.Typer()

Model = Annotated[str, Argument(metavar="MODEL", help="models:/NAME@champion or models:/NAME/3.")]
RegistryAddress = Annotated[
    str | None, Option("--registry", metavar="URI", help="MLflow's address, instead of tracking.uri in params.yaml.")
]


@command(models)
def rollback(
    reason: Reason,
    to: Annotated[int | None, Option("--to", min=1, metavar="VERSION", help="Default: the one before.")] = None,
    back: Annotated[int, Option("--back", min=1, metavar="N", help="How many champions back.")] = 1,
    defect: Annotated[bool, Option("--defect", help="Never return to the version rolled back now.")] = False,
    hold: Annotated[bool, Option("--hold", help="Promote nothing until `registry release`.")] = False,
) -> str:
    """Make an earlier champion the champion again."""
    from tasks.commands import rollback as verb

    return verb.rollback(to=to, back=back, reason=reason, defect=defect, hold=hold)


@command(models)
def prune(
    keep: Annotated[int | None, Option("--keep", min=1, metavar="N", help="Runs; not pipeline.retention's.")] = None,
    yes: Annotated[bool, Option("--yes", help="Remove what is listed.")] = False,
) -> Any:
    """List what nothing needs any more; with --yes remove it."""
    from tasks.commands.prune import prune as verb

    return verb.prune(keep=keep, yes=yes)


@command(models)
def lineage(
    uri: Model,
    as_json: Annotated[bool, Option("--json", help="Everything, for a program.")] = False,
    verify: Annotated[
        Path | None, Option("--verify", metavar="DIR", help="Build it again in DIR, empty or new, and compare.")
    ] = None,
    registry: RegistryAddress = None,
) -> Any:
    """Where a registered model came from."""
    from tasks.commands import lineage as verb
    from tasks.core.console import SafeConsole

    if verify is not None:
        from tasks.commands.rebuild import verify as rebuild_and_compare

        if as_json:
            raise ValueError("--json prints what is recorded, and --verify a comparison: ask for one of them.")
        return rebuild_and_compare(uri, verify, registry, SafeConsole())
    row = verb.lineage(uri, registry)
    return verb.as_json(row) if as_json else verb.print_lineage(row, SafeConsole())


@command(models)
def fetch(
    uri: Model,
    folder: Annotated[Path, Argument(metavar="DIR", help="A new or empty folder.")],
    registry: RegistryAddress = None,
) -> str:
    """A registered model, or what s3:// names, as a folder."""
    from tasks.commands import fetch as verb

    return verb.fetch(uri, folder, registry)


@command(models)
def serve(
    source: Annotated[str, Argument(metavar="SOURCE", help="models:/NAME@champion, models:/NAME/3, or a folder.")],
    record: Annotated[
        Path | None, Option("--record", metavar="DIR", help="Write every conversation there, redacted.")
    ] = None,
    port: Annotated[
        int | None, Option("--port", min=0, max=65535, help="Default: serve.port; 0 is a free one.")
    ] = None,
    registry: RegistryAddress = None,
) -> None:
    """A model behind OpenAI's and Anthropic's protocols; follows its alias."""
    from tasks.commands.serve import serve as verb

    verb.serve(source, record=record, port=port, address=registry)
