"""One stage by hand, the report, or another profile. The whole chain is `python -m flows run`.

Every command imports what it needs when it is called, so `--help` answers in a blink.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from tasks.core.terminal import tell
from tasks.pipeline.cli_errors import one_line_errors, stop_in_another_python

try:
    import typer
except ModuleNotFoundError as error:
    stop_in_another_python(error)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
cache = typer.Typer(no_args_is_help=True)
app.add_typer(cache, name="cache", help="The answers of tools, recorded.")
registry = typer.Typer(no_args_is_help=True)
app.add_typer(registry, name="registry", help="The journal of promotions, and MLflow's aliases.")
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback where something fails.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the journal.")]
RegistryAddress = Annotated[
    str | None, typer.Option("--registry", metavar="URI", help="Of MLflow, instead of tracking.uri in params.yaml.")
]
AcceptDrift = Annotated[
    bool, typer.Option("--accept-drift", help="Go on in an environment that changed since curation; the lineage tells.")
]


@app.command()
def curate(debug: Debug = False) -> None:
    """Validate problems, drop duplicates, split them three ways."""
    _run("curate", debug)
    with one_line_errors(debug=debug):
        from tasks.commands.doctor.outlook import print_outlook

        print_outlook()


@app.command()
def assess(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Measure the base model: does it need a warm start?"""
    _run("assess", debug, accept_drift)


@app.command(name="warm_start")
def warm_start(debug: Debug = False) -> None:
    """Fine-tune on expert episodes, where that is needed."""
    _run("warm_start", debug)


@app.command()
def train(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Learn by reinforcement; leaves snapshots."""
    _run("train", debug, accept_drift)


@app.command()
def evaluate(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Choose a snapshot on select, confirm it on test."""
    _run("evaluate", debug, accept_drift)


@app.command()
def promote(
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the checks say; altered weights are refused all the same.")
    ] = False,
    approve: Annotated[bool, typer.Option("--approve", help="Complete the decision that waits for approval.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take back the decision that waits.")] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Why; each of these needs one.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who approves or withdraws; else this machine's user.")
    ] = None,
    accept_drift: AcceptDrift = False,
    debug: Debug = False,
) -> None:
    """The best snapshot against the champion."""
    with one_line_errors(debug=debug):
        from tasks.stages.promote.overrides import read_override

        override = read_override(force=force, approve=approve, withdraw=withdraw, reason=reason, by=by)
        if override is not None and override.kind != "force":
            from tasks.stages.promote import approvals

            for line in (approvals.approve if override.kind == "approve" else approvals.withdraw)(override):
                tell(line)
            return
    _run("promote", debug, accept_drift, override=override)


@app.command()
def rollback(
    reason: Reason,
    to: Annotated[int | None, typer.Option("--to", min=1, metavar="VERSION", help="Instead of the one before.")] = None,
    back: Annotated[int, typer.Option("--back", min=1, metavar="N", help="How many champions back.")] = 1,
    defect: Annotated[bool, typer.Option("--defect", help="Never roll back to what is rolled back now.")] = False,
    hold: Annotated[bool, typer.Option("--hold", help="Promote nothing until `registry release`.")] = False,
    debug: Debug = False,
) -> None:
    """Make the champion before champion again."""
    with one_line_errors(debug=debug):
        from tasks.commands import rollback as verb

        tell(verb.rollback(to=to, back=back, reason=reason, defect=defect, hold=hold))


@app.command()
def lineage(
    uri: Annotated[str, typer.Argument(metavar="MODEL", help="models:/NAME@champion or models:/NAME/3.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for a program.")] = False,
    verify: Annotated[
        Path | None,
        typer.Option("--verify", metavar="DIR", help="Make it again in DIR, empty or new, and compare; goes on there."),
    ] = None,
    registry: RegistryAddress = None,
    debug: Debug = False,
) -> None:
    """Where a registered model came from."""
    with one_line_errors(debug=debug):
        from tasks.commands import lineage as verb
        from tasks.core.console import SafeConsole

        if verify is not None:
            from tasks.commands.rebuild import verify as rebuild_and_compare

            if as_json:
                raise ValueError("--json prints what is recorded, and --verify a comparison: ask for one of them.")
            if not rebuild_and_compare(uri, verify, registry, SafeConsole()):
                raise SystemExit(1)
            return
        row = verb.lineage(uri, registry)
        if as_json:
            tell(verb.as_json(row))
        else:
            verb.print_lineage(row, SafeConsole())


@app.command()
def fetch(
    uri: Annotated[str, typer.Argument(metavar="MODEL", help="models:/NAME@champion or models:/NAME/3.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made; where it is there, it must be empty.")],
    registry: RegistryAddress = None,
    debug: Debug = False,
) -> None:
    """A registered model as a folder, its weights verified."""
    with one_line_errors(debug=debug):
        from tasks.commands import fetch as verb

        tell(verb.fetch(uri, folder, registry))


@app.command()
def doctor(accept_drift: AcceptDrift = False, debug: Debug = False) -> None:
    """Look for what would go wrong in training; a table."""
    with one_line_errors(debug=debug):
        from tasks.commands.doctor.doctor import run_doctor
        from tasks.drift.pin import accept_drift_from_now_on

        if accept_drift:
            accept_drift_from_now_on()
        if not run_doctor(debug=debug):
            raise SystemExit(1)


@app.command()
def report(
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Two policies instead: a run's folder, a trajectories file or models:/NAME@alias each.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Of --compare; else artifacts/compare.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Build the chart, the report page and the table."""
    with one_line_errors(debug=debug):
        if compare is not None:
            from tasks.commands import compare as verb
            from tasks.core.console import SafeConsole

            verb.compare(compare, out, SafeConsole())
            return
        if out is not None:
            raise ValueError("--out is for --compare: the report of this run is always artifacts/report.")
        from tasks.core.settings import load_paths, read_params
        from tasks.pipeline.run_lock import only_run

        paths = load_paths(read_params())
        with only_run(paths.artifacts):
            from tasks.core.console import SafeConsole
            from tasks.report.build import build_all
            from tasks.report.summary import print_summary

            print_summary(build_all(paths), paths, SafeConsole())


@app.command()
def ablate(
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, metavar="N", help="Instead of train.num_iterations.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="N", help="Training seeds a variant: seed, seed + 1, and so on.")
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="One variant, such as kl_0; may be given several times."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train with KL, reference, reward and overlong filter varied."""
    with one_line_errors(debug=debug):
        from tasks.commands.ablate.ablate import run_ablation

        run_ablation(only=only or [], num_seeds=seeds, num_iterations=iterations)


@app.command()
def score(
    environment: Annotated[str, typer.Option("--environment", metavar="NAME", help="A world of the catalog.")],
    calls: Annotated[
        str, typer.Option("--calls", metavar="FILE", help="JSONL, as tasks/commands/score.py shows; - is stdin.")
    ],
    debug: Debug = False,
) -> None:
    """Play calls that are written down, and judge them."""
    with one_line_errors(debug=debug):
        from tasks.commands import score as verb

        if not verb.score(environment, calls):
            raise SystemExit(1)


@app.command()
def export(
    trajectories: Annotated[
        str | None,
        typer.Option(
            "--trajectories", metavar="WHAT", help="A run's folder, a file or models:/NAME@alias; else this run."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="A folder, .jsonl or .json; else artifacts/export/atif."),
    ] = None,
    file_format: Annotated[str, typer.Option("--format", metavar="NAME", help="atif, the one there is.")] = "atif",
    tokens: Annotated[bool, typer.Option("--tokens/--no-tokens", help="Token ids and log-probs, or counts.")] = True,
    debug: Debug = False,
) -> None:
    """Write trajectories in a format that other viewers open."""
    with one_line_errors(debug=debug):
        from tasks.commands.export import export as verb

        for line in verb.export(trajectories, out, file_format=file_format, with_tokens=tokens):
            tell(line)


@app.command()
def profile(
    name: Annotated[str, typer.Argument(help="The name of a file in infra/profiles, without .yaml.")],
    debug: Debug = False,
) -> None:
    """Rewrite params.yaml from infra/profiles; shows what changes."""
    with one_line_errors(debug=debug):
        from tasks.commands.profile import apply_profile

        for line in apply_profile(name):
            tell(line)


@cache.command()
def freeze(
    path: Annotated[
        Path | None,
        typer.Argument(help="The file to write; else environment.cache.frozen, or tasks/custom/tool_cache.jsonl."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write all that was recorded to a file that DVC versions."""
    with one_line_errors(debug=debug):
        from tasks.commands import freeze_cache as verb

        for line in verb.freeze(path):
            tell(line)


@registry.command()
def show(debug: Debug = False) -> None:
    """The record: champion, what differs, holds, the last entries."""
    with one_line_errors(debug=debug):
        from tasks.commands import registry as verb

        for line in verb.show():
            tell(line)


@registry.command()
def restore(debug: Debug = False) -> None:
    """Put aliases and tags back as recorded."""
    with one_line_errors(debug=debug):
        from tasks.commands import registry as verb

        tell(verb.restore())


@registry.command()
def adopt(reason: Reason, debug: Debug = False) -> None:
    """Make the record what MLflow shows now."""
    with one_line_errors(debug=debug):
        from tasks.commands import registry as verb

        tell(verb.adopt(reason=reason))


@registry.command()
def release(reason: Reason, debug: Debug = False) -> None:
    """Let promotions happen again after `rollback --hold`."""
    with one_line_errors(debug=debug):
        from tasks.commands import registry as verb

        tell(verb.release(reason=reason))


def _run(stage: str, debug: bool, accept_drift: bool = False, **asked: Any) -> None:
    """`asked` is what the command line asks of the stage beyond params.yaml."""
    with one_line_errors(debug=debug):
        from tasks.drift.pin import accept_drift_from_now_on
        from tasks.pipeline.order import run_stage

        if accept_drift:
            accept_drift_from_now_on()

        folder = run_stage(stage, **asked)
        tell(f"{stage}: results are in {folder} ({', '.join(sorted(item.name for item in folder.iterdir()))})")


def _pin_hash_seed() -> None:
    """Start over with hash randomisation off: the order of a set of strings must not differ from run to run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    _pin_hash_seed()
    app()
