"""python -m flows run | serve | deploy | approve: the flow once, now; on a schedule on this machine; on a server's
workers; and a person's answer to a run that waits for it.

Imports are inside the commands: Prefect reads environment variables at import, and `--help` must be instant.
"""

from __future__ import annotations

import os
import shlex
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Literal

from tasks.core.quick_exit import prepare_quick_exit, quick_exit
from tasks.pipeline.cli_errors import one_line_errors, stop_in_another_python
from tasks.pipeline.run_lock import RUN, SERVE, AnotherRun, FolderLock, only_run

if __name__ == "__main__":
    prepare_quick_exit()

try:
    import typer

    from tasks.commands.cli.options import APP_OPTIONS, AcceptDrift, Workspace, use_accept_drift, use_workspace
except ModuleNotFoundError as error:
    stop_in_another_python(error)

POOL = "turnwise"
LOOK_SECONDS = 5.0  # between two looks whether the folder is free
HELP = "Run everything that changed, from the problems to the promoted model: once now, or on a schedule."
app = typer.Typer(help=HELP, **APP_OPTIONS)
Debug = Annotated[bool, typer.Option("--debug", help="Show Prefect's log, and a traceback where something fails.")]
ReasonText = Annotated[str, typer.Option("--reason", help="Why this run is wanted; recorded with the run.")]
Force = Annotated[bool, typer.Option("--force", help="Train anew also where nothing changed; needs --reason.")]
CheckCron = Annotated[
    str | None, typer.Option(help='When to run drift-check, such as "30 * * * *"; without it nothing starts it.')
]


@app.callback()
def prepare(workspace: Workspace = None) -> None:
    use_workspace(workspace)


@app.command()
def run(reason: ReasonText = "", force: Force = False, accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Run every stage that changed, promote the result, build the report."""
    with one_line_errors(debug=debug), ExitStack() as held:
        use_accept_drift(accept_drift)
        reason = reason.strip()
        if reason or force:
            from tasks.pipeline.reasons import check_asked

            check_asked(reason, force=force)
        _prepare(held, shows_log=debug)
        if not (reason or force) and _tell_unchanged():
            return
        from flows.server import start_server
        from tasks.core.terminal import tell

        tell("flow: its server and libraries start")  # 7 to 20 s, in which nothing else is said
        server = start_server(with_scheduler=False)
        _load_ahead(held)
        from flows.connection import check_server, show_what_ended_the_run
        from flows.retrain import retrain  # takes about as long to import as the server to start
        from flows.verdict import SKIPPED

        server.wait_until_up()
        if server.process is None:
            check_server()
        with server.end_this_process_with_it(), show_what_ended_the_run():
            state = retrain(reason=reason, force=force, is_shown=True, return_state=True)
        if state.name == SKIPPED:
            raise ValueError(str(state.message))
        state.result()  # raises what ended it


@app.command()
def serve(
    cron: Annotated[
        str, typer.Option(help='When to run, in the machine\'s time zone, such as "0 3 * * *" (each night at 3).')
    ],
    check_cron: CheckCron = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of Prefect's page; 0: any free one.")] = 0,
    debug: Debug = False,
) -> None:
    """Run the flows on a schedule on this machine until Ctrl-C."""
    with one_line_errors(debug=debug), ExitStack() as held:
        _prepare(held, SERVE, shows_log=True)
        from flows.supervisor import keep_schedule

        keep_schedule(cron, check_cron, port=port)


@app.command()
def deploy(
    pool: Annotated[str, typer.Option(help="The work pool whose workers run the flows; made where missing.")] = POOL,
    pool_type: Annotated[
        Literal["process", "kubernetes"], typer.Option("--type", help="Of the work pool.")
    ] = "process",
    cron: Annotated[
        str | None, typer.Option(help='When to run retrain, such as "0 3 * * *"; without it the schedule stays.')
    ] = None,
    check_cron: CheckCron = None,
    folder: Annotated[
        Path | None, typer.Option(help="This folder as a worker's job sees it, where that is another path.")
    ] = None,
    automations: Annotated[
        bool, typer.Option("--automations", help="Also those of infra/automations/: notify, reload, retrain, crash.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Register the flows on the server of PREFECT_API_URL, for the workers of a pool; safe to repeat."""
    with one_line_errors(debug=debug):
        _require_server(
            "there is nowhere to register the flows",
            'for one machine without a server: python -m flows serve --cron "0 3 * * *"',
        )
        _prepare(None, shows_log=debug)
        from flows.connection import check_server
        from flows.deployments import check_pool, plan_deployments, register
        from tasks.core.terminal import tell

        check_pool(pool)
        planned = plan_deployments(cron, check_cron)
        check_server()
        for line in register(planned, pool=pool, pool_type=pool_type, folder=str(folder or Path.cwd())):
            tell(line)
        if automations:
            from flows.automations import register_automations

            for line in register_automations(planned[0].model, planned[0].name):
                tell(line)
        tell(f"Runs need a worker: prefect worker start --pool {shlex.quote(pool)}")


@app.command()
def approve(
    run: Annotated[
        str | None, typer.Argument(help="Its id, the first 8 letters of that, or its name; else the runs are listed.")
    ] = None,
    decline: Annotated[bool, typer.Option("--decline", help="Decline instead.")] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Your name; default: this user's.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; recorded for good.")] = None,
    debug: Debug = False,
) -> None:
    """Answer a run that waits for a person's approval, of this folder's `serve` or on the server of PREFECT_API_URL."""
    with one_line_errors(debug=debug):
        from flows.server import find_serve, prepare_environment
        from tasks.core.settings import load_paths, read_params
        from tasks.core.terminal import tell
        from tasks.stages.promote.overrides import read_override

        _refuse_half_an_answer(run, reason, is_begun=decline or by is not None)
        override = read_override(
            force=False, approve=run is not None and not decline, withdraw=decline, reason=reason, by=by
        )
        artifacts = load_paths(read_params()).artifacts
        find_serve(artifacts)
        _require_server(
            "no run waits there, and no `serve` is at work in this folder",
            "a decision can also be approved without one: python -m tasks promote --approve",
        )
        prepare_environment(artifacts, shows_log=debug)
        from flows.approve_command import list_waiting, send_answer
        from flows.connection import check_server

        check_server()
        for line in list_waiting() if run is None or override is None else [send_answer(run, override)]:
            tell(line)


def _refuse_half_an_answer(run: str | None, reason: str | None, *, is_begun: bool) -> None:
    if run is None and (is_begun or reason is not None):
        raise ValueError(
            "--decline, --by and --reason belong to an answer, and no run was named. Name one of those that "
            "`python -m flows approve` lists."
        )
    if run is not None and not (reason or "").strip():
        raise ValueError(
            "an answer needs a reason: the record must explain later why this model went into production, or did not. "
            'Add --reason "…".'
        )


def _require_server(consequence: str, instead: str) -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise ValueError(
            f"PREFECT_API_URL names no server, so {consequence}. Export it, such as http://HOST:4200/api; {instead}."
        )


def _tell_unchanged() -> bool:
    """Say since when nothing changed, where that is known without MLflow; then no server is started either. A server of
    the user's gets a run, which says the same there.
    """
    if os.environ.get("PREFECT_API_URL"):
        return False
    from flows.dead_locks import release_dead_locks
    from tasks.core.console import SafeConsole
    from tasks.core.settings import load_paths, read_params
    from tasks.core.terminal import tell
    from tasks.pipeline.reasons import find_unchanged
    from tasks.report.summary import print_places

    params = read_params()
    paths = load_paths(params)
    release_dead_locks()
    found = find_unchanged(params, paths)
    if found is None:
        return False
    tell(found.sentence)
    print_places(paths, SafeConsole())
    return True


def _load_ahead(held: ExitStack) -> None:
    """Have the stages' libraries loaded beside Prefect and its server, for which the flow waits."""
    from flows.fork_server import ForkServer, forks_log
    from flows.loaded_early import NEEDED
    from tasks.core.child_processes import own_guardian

    forks = held.enter_context(
        closing(ForkServer(own_guardian(), forks_log(), ["dvc repro", *(f"tasks {name}" for name in NEEDED)]))
    )
    os.environ.update(forks.variables)


def _prepare(held: ExitStack | None, lock: FolderLock = RUN, *, shows_log: bool) -> None:
    """Refuse what can be refused before a server starts. `held` keeps the lock; with None nothing runs here."""
    from flows.server import forget_killed_serve, prepare_environment
    from tasks.core.params_text import refuse_what_dvc_cannot_read
    from tasks.core.settings import PARAMS_FILE, load, load_paths, read_params
    from tasks.core.surroundings import check_place, check_writable, refuse_unusable_socks
    from tasks.pipeline.order import check_machine, check_params, check_sources, search_for_cycles_rarely
    from tasks.storage.inputs import share_endpoint
    from tasks.tracking.connection import refuse_lost_registry
    from tasks.tracking.settings import TrackingSections

    search_for_cycles_rarely()  # Prefect and MLflow are imported after this
    check_params()
    refuse_what_dvc_cannot_read(PARAMS_FILE.read_text(encoding="utf-8"), PARAMS_FILE)
    params = read_params()
    share_endpoint(params)
    check_sources(params)
    if held is not None:
        check_machine(params)
        _refuse_without_git(Path.cwd())
    refuse_lost_registry(load(TrackingSections, params).tracking)
    artifacts = load_paths(params).artifacts
    check_place(artifacts)
    check_writable(*(folder for folder in (Path.cwd(), Path(".dvc").absolute()) if folder.exists()))  # DVC writes here
    refuse_unusable_socks(os.environ)
    if held is not None:
        _take(held, artifacts, lock, waits=lock is RUN and params["pipeline"]["on_busy"] == "wait")
    if lock is SERVE:
        forget_killed_serve(artifacts)
    prepare_environment(artifacts, shows_log=shows_log)


def _refuse_without_git(folder: Path) -> None:
    """Unless DVC was told that there is none."""
    from tasks.commands.dvc_remote import ask_dvc

    if any((place / ".git").exists() for place in (folder, *folder.parents)):
        return
    if ask_dvc("config", "core.no_scm", may_fail=True).lower() not in ("true", "yes", "on", "1"):
        raise ValueError(
            f"{folder} is in no git repository, so DVC, which runs the stages, would stop. Run `git init`, or "
            f"`dvc config --local core.no_scm true` to go without."
        )


def _take(held: ExitStack, artifacts: Path, lock: FolderLock, *, waits: bool) -> None:
    """Take the folder's lock, here and not in the flow, whose server would wait with it."""
    from tasks.core.terminal import tell

    is_told = False
    while True:
        try:
            held.enter_context(only_run(artifacts, lock))
            return
        except AnotherRun as other:
            if not waits:
                raise
            if not is_told:
                tell(f"{other.found}. This one waits for its end (pipeline.on_busy).")
            is_told = True
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    with quick_exit():
        app()
