"""python -m flows run | serve: the flow once, now, or on a schedule on this machine.

Imports are inside the commands: Prefect reads environment variables at import, and `--help` must be instant.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from tasks.pipeline.cli_errors import one_line_errors, stop_in_another_python

try:
    import typer
except ModuleNotFoundError as error:
    stop_in_another_python(error)

HELP = "Run everything that changed, from the problems to the promoted model: once now, or on a schedule."
app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=HELP
)
Debug = Annotated[bool, typer.Option("--debug", help="Show Prefect's log, and a traceback where something fails.")]
AcceptDrift = Annotated[
    bool,
    typer.Option("--accept-drift", help="Go on in an environment that changed since curation; the lineage records it."),
]


@app.command()
def run(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Run every stage that changed, promote the result, build the report."""
    with one_line_errors(debug=debug), ExitStack() as held:
        if accept_drift:
            from tasks.drift.pin import accept_drift_from_now_on

            accept_drift_from_now_on()
        _prepare(held, shows_log=debug)
        from flows.server import start_server

        server = start_server(with_scheduler=False)
        from flows.retrain import retrain  # takes about as long to import as the server to start

        server.wait_until_up()
        with server.end_this_process_with_it():
            retrain(is_shown=True)


@app.command()
def serve(
    cron: Annotated[
        str, typer.Option(help='When to run, in the machine\'s time zone, such as "0 3 * * *" (each night at 3).')
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of Prefect's page; 0: any free one.")] = 0,
    debug: Debug = False,
) -> None:
    """Run the flow on a schedule until Ctrl-C."""
    with one_line_errors(debug=debug):
        _prepare(None, shows_log=True)
        from flows.supervisor import keep_schedule

        keep_schedule(cron, port=port)


def _prepare(held: ExitStack | None, *, shows_log: bool) -> None:
    """Refuse what can be refused before a server starts. `held` keeps the lock; with None each run takes it."""
    from flows.server import prepare_environment
    from tasks.core.settings import load, load_paths, read_params
    from tasks.core.surroundings import check_place, check_writable, refuse_unusable_socks
    from tasks.pipeline.order import check_params, check_sources
    from tasks.pipeline.run_lock import only_run
    from tasks.tracking.connection import refuse_lost_registry
    from tasks.tracking.settings import TrackingSections

    check_params()
    params = read_params()
    check_sources(params)
    refuse_lost_registry(load(TrackingSections, params).tracking)
    artifacts = load_paths(params).artifacts
    check_place(artifacts)
    check_writable(*(folder for folder in (Path.cwd(), Path(".dvc").absolute()) if folder.exists()))  # DVC writes here
    refuse_unusable_socks(os.environ)
    if held is not None:
        held.enter_context(only_run(artifacts))
    prepare_environment(artifacts, shows_log=shows_log)


if __name__ == "__main__":
    app()
