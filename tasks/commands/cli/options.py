"""Options that several groups of commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tasks.pipeline.cli_errors import one_line_errors

APP_OPTIONS: dict[str, Any] = {  # of both doors
    "add_completion": False,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
AcceptDrift = Annotated[
    bool, Option("--accept-drift", help="Go on in an environment that changed since curation; the lineage records it.")
]
Reason = Annotated[str, Option("--reason", metavar="TEXT", help="Why; kept in the journal.")]
Workspace = Annotated[
    Path | None,
    Option("--workspace", metavar="DIR", help="Work in that folder; default: TURNWISE_WORKSPACE, or this folder."),
]


def use_workspace(folder: Path | None) -> None:
    """Before the command's own options are used: paths in them are relative to the workspace."""
    from tasks.core.workspace import enter_workspace

    with one_line_errors(debug=False):
        enter_workspace(folder)


def use_accept_drift(is_accepted: bool) -> None:
    if is_accepted:
        from tasks.drift.pin import accept_drift_from_now_on

        accept_drift_from_now_on()
