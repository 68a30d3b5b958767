"""Run one stage, check the setup, look at and move registered models, or build the report.

To run every stage: `python -m flows run`.
"""

# The groups of commands; their arguments are in tasks/commands/cli/.
from __future__ import annotations

import os
import sys

from tasks.core.quick_exit import prepare_quick_exit, quick_exit


def _pin_hash_seed() -> None:
    """Restart without hash randomisation: the order of a set of strings must be the same in every run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_fork() -> bool:
    """Whether this is a fork of a flow's server. Where it is none and there is a server (`VARIABLE` of forked.py, whose
    import is for those alone who have one), that one runs the command.
    """
    if "TURNWISE_FORK_SERVER" not in os.environ:
        return False
    from tasks.core.fork_request import IS_FORK
    from tasks.core.forked import run_forked

    run_forked(["tasks", *sys.argv[1:]])
    return os.environ.get(IS_FORK) == str(os.getpid())


if __name__ == "__main__":
    is_fork = _is_fork()
    _pin_hash_seed()  # before the imports below, which it would repeat
    if not is_fork:  # else its server has, before it loaded libraries
        prepare_quick_exit()

from tasks.pipeline.cli_errors import stop_in_another_python  # noqa: E402

try:
    import typer

    from tasks.commands.cli.archive import archives
    from tasks.commands.cli.cache import cache
    from tasks.commands.cli.checks import checks
    from tasks.commands.cli.models import models
    from tasks.commands.cli.options import APP_OPTIONS, Workspace, use_workspace
    from tasks.commands.cli.registry import registry
    from tasks.commands.cli.results import results
    from tasks.commands.cli.stages import stages
    from tasks.commands.cli.workspace import workspace as workspaces
except ModuleNotFoundError as error:
    stop_in_another_python(error)

app = typer.Typer(help=__doc__, **APP_OPTIONS)
for group in (stages, models, checks, results, archives):
    app.add_typer(group)
app.add_typer(cache, name="cache", help="The recorded replies of tools.")
app.add_typer(registry, name="registry", help="The journal of promotions, and MLflow's aliases.")
app.add_typer(workspaces, name="workspace", help="Folders for several agents of one installation.")


@app.callback()
def prepare(context: typer.Context, workspace: Workspace = None) -> None:
    if context.invoked_subcommand != "workspace":  # which makes one
        use_workspace(workspace)


if __name__ == "__main__":
    with quick_exit():
        app()
