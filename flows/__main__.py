"""python -m flows run | serve: the flow once, now, or on a schedule on this machine.

Everything heavy is imported inside the commands, after the environment Prefect reads is set, so `--help` is instant.
On many machines use a Prefect server, a work pool and `infra/prefect.yaml` instead of `serve`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tasks.command_line import one_line_errors

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
Debug = Annotated[bool, typer.Option("--debug", help="Show Prefect's log, and a traceback where something fails.")]
AcceptDrift = Annotated[
    bool, typer.Option("--accept-drift", help="Go on in an environment that changed since curation; the lineage tells.")
]


@app.command()
def run(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Run every stage that changed, promote the result, build the report."""
    with one_line_errors(debug=debug):
        if accept_drift:
            from tasks.pinning import accept_drift_from_now_on

            accept_drift_from_now_on()
        _prepare(is_only_flow=True, shows_log=debug)
        from flows.server import start_server

        wait_for_server = start_server(with_scheduler=False)
        from flows.retrain import retrain  # takes about as long to import as the server to start

        wait_for_server()
        retrain(is_shown=True)


@app.command()
def serve(
    cron: Annotated[str, typer.Option(help="When to run, as a cron expression in the machine's time zone.")],
    debug: Debug = False,
) -> None:
    """Stay, and run the flow on a schedule: `python -m flows serve --cron "0 3 * * *"`. Ctrl-C ends it."""
    with one_line_errors(debug=debug):
        _prepare(is_only_flow=False, shows_log=True)
        from flows.server import start_server

        wait_for_server = start_server(with_scheduler=True)  # before any import of Prefect, which reads where it is
        from prefect.client.schemas.schedules import CronSchedule

        try:
            CronSchedule(cron=cron)
        except ValueError:
            raise ValueError(
                f"--cron {cron!r} is not a cron expression, so no run would ever start. "
                f'Five fields are wanted: minute, hour, day, month, weekday, as in "0 3 * * *".'
            ) from None
        from flows.retrain import retrain

        print(f"Prefect's server: {wait_for_server()}. Runs {cron!r}; Ctrl-C ends.", flush=True)
        retrain.serve(name="retrain", cron=cron, limit=1, print_starting_message=False)


def _prepare(*, is_only_flow: bool, shows_log: bool) -> None:
    """Everything that can be refused is refused before a server starts."""
    from flows.server import prepare_environment
    from tasks.folder_lock import only_run
    from tasks.settings import load, load_paths, read_params
    from tasks.stages import check_params, check_sources
    from tasks.tracking.connection import TrackingSection, refuse_lost_registry

    check_params()
    params = read_params()
    check_sources(params)
    refuse_lost_registry(load(TrackingSection, params).tracking)
    artifacts = load_paths(params).artifacts
    if is_only_flow:
        with only_run(artifacts):  # said now; taken for good by the flow
            pass
    prepare_environment(artifacts, shows_log=shows_log)


if __name__ == "__main__":
    app()
