"""Run one stage, check the setup, look at and move registered models, or build the report.

To run every stage: `python -m flows run`.
"""

# Argument parsing only. Each command imports what it needs when it is called, so `--help` answers at once.
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from tasks.core.terminal import tell
from tasks.pipeline.cli_errors import stop_in_another_python

try:
    import typer
    from typer import Argument, Option

    from tasks.pipeline.cli_command import Debug, command
except ModuleNotFoundError as error:
    stop_in_another_python(error)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
cache = typer.Typer(no_args_is_help=True)
app.add_typer(cache, name="cache", help="The recorded replies of tools.")
registry = typer.Typer(no_args_is_help=True)
app.add_typer(registry, name="registry", help="The journal of promotions, and MLflow's aliases.")

AcceptDrift = Annotated[
    bool, Option("--accept-drift", help="Go on in an environment that changed since curation; the lineage records it.")
]
Reason = Annotated[str, Option("--reason", metavar="TEXT", help="Why; kept in the journal.")]
Model = Annotated[str, Argument(metavar="MODEL", help="models:/NAME@champion or models:/NAME/3.")]
RegistryAddress = Annotated[
    str | None, Option("--registry", metavar="URI", help="MLflow's address, instead of tracking.uri in params.yaml.")
]


@command(app)
def curate() -> None:
    """Validate problems, drop duplicates, split them three ways."""
    tell(_run("curate"))
    from tasks.commands.doctor.outlook import print_outlook

    print_outlook()


@command(app)
def assess(accept_drift: AcceptDrift = False) -> str:
    """Measure the base model: does it need a warm start?"""
    return _run("assess", accept_drift)


@command(app)
def warm_start() -> str:
    """Fine-tune on expert episodes, where that is needed."""
    return _run("warm_start")


@command(app)
def train(accept_drift: AcceptDrift = False) -> str:
    """Train by reinforcement learning; writes snapshots."""
    return _run("train", accept_drift)


@command(app)
def evaluate(accept_drift: AcceptDrift = False) -> str:
    """Choose a snapshot on select, confirm it on test."""
    return _run("evaluate", accept_drift)


@command(app)
def promote(
    force: Annotated[
        bool, Option("--force", help="Promote even if checks fail. Altered weights are still refused.")
    ] = False,
    approve: Annotated[bool, Option("--approve", help="Complete the decision that waits for approval.")] = False,
    withdraw: Annotated[bool, Option("--withdraw", help="Withdraw the decision that waits.")] = False,
    reason: Annotated[str | None, Option("--reason", metavar="TEXT", help="Why; each of these needs one.")] = None,
    by: Annotated[str | None, Option("--by", metavar="NAME", help="Your name; default: this machine's user.")] = None,
    accept_drift: AcceptDrift = False,
) -> Any:
    """Promote the best snapshot if it beats the champion."""
    from tasks.stages.promote.overrides import read_override

    override = read_override(force=force, approve=approve, withdraw=withdraw, reason=reason, by=by)
    if override is None or override.kind == "force":
        return _run("promote", accept_drift, override=override)
    from tasks.stages.promote import approvals

    return approvals.approve(override) if approve else approvals.withdraw(override)


@command(app)
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


@command(app)
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


@command(app)
def fetch(
    uri: Model,
    folder: Annotated[Path, Argument(metavar="DIR", help="A new or empty folder.")],
    registry: RegistryAddress = None,
) -> str:
    """A registered model as a folder, its weights verified."""
    from tasks.commands import fetch as verb

    return verb.fetch(uri, folder, registry)


@command(app)
def doctor(accept_drift: AcceptDrift = False, debug: Debug = False) -> Any:
    """Check for what would go wrong in training; prints a table."""
    from tasks.commands.doctor.doctor import run_doctor

    _accept_drift(accept_drift)
    return run_doctor(debug=debug)


@command(app)
def plan(
    model: Annotated[str | None, Option(metavar="NAME", help="A folder, or a known name such as Qwen2.5-7B.")] = None,
    gpu: Annotated[str | None, Option(metavar="NAME", help="Such as h100-80gb or cpu; 24gb: memory alone.")] = None,
    profile: Annotated[list[str] | None, Option(metavar="NAME", help="Not params.yaml; repeat for more.")] = None,
    dollars_per_hour: Annotated[float | None, Option(min=0, help="What the machine costs.")] = None,
    tokens: Annotated[tuple[int, int, int] | None, Option(help="A mean episode: prompt, sampled, replies.")] = None,
    as_json: Annotated[bool, Option("--json", help="Everything, for a program.")] = False,
) -> Any:
    """Memory, time and dollars of a run, before it starts; status 1: it does not fit."""
    from tasks.commands.plan import output
    from tasks.commands.plan import plan as verb

    found = verb.make_plan(model, gpu, profile or [], dollars_per_hour, tokens)
    return verb.as_json(found) if as_json else output.print_plan(found)


@command(app)
def report(
    compare: Annotated[
        tuple[str, str] | None,
        Option("--compare", metavar="A B", help="Two policies: a run's folder, a file or models:/NAME@alias each."),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="For --compare; default: artifacts/compare.")
    ] = None,
) -> None:
    """Build the chart, the report page and the table."""
    from tasks.commands import report as verb

    verb.report(compare, out)


@command(app)
def ablate(
    iterations: Annotated[
        int | None, Option("--iterations", min=1, metavar="N", help="Of each run. Default: those of params.yaml.")
    ] = None,
    seeds: Annotated[int, Option("--seeds", min=1, metavar="N", help="Training seeds per variant.")] = 1,
    only: Annotated[list[str] | None, Option("--only", metavar="NAME", help="A variant; repeat for more.")] = None,
) -> None:
    """Train the variants of infra/ablation.yaml and compare them."""
    from tasks.commands.ablate.ablate import run_ablation

    run_ablation(only=only or [], num_seeds=seeds, num_iterations=iterations)


@command(app)
def score(
    environment: Annotated[str, Option("--environment", metavar="NAME", help="A folder of tasks/environments.")],
    calls: Annotated[str, Option("--calls", metavar="FILE", help="JSONL, see tasks/commands/score.py; - is stdin.")],
) -> Any:
    """Play recorded calls, and judge them."""
    from tasks.commands import score as verb

    return verb.score(environment, calls)


@command(app)
def export(
    trajectories: Annotated[
        str | None,
        Option("--trajectories", metavar="WHAT", help="A run's folder, a file or models:/NAME@alias; else this run."),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", metavar="PATH", help="A folder, .jsonl or .json; else artifacts/export/atif.")
    ] = None,
    file_format: Annotated[str, Option("--format", metavar="NAME", help="atif, the one there is.")] = "atif",
    tokens: Annotated[bool, Option("--tokens/--no-tokens", help="Token ids and log-probs, or counts.")] = True,
) -> list[str]:
    """Write trajectories in a format that other viewers open."""
    from tasks.commands.export import export as verb

    return verb.export(trajectories, out, file_format=file_format, with_tokens=tokens)


@command(app)
def profile(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Of infra/profiles; the later over the earlier.")],
) -> list[str]:
    """Rewrite params.yaml from infra/profiles; shows what changes."""
    from tasks.commands.profile import apply_profiles

    return apply_profiles(names)


@command(cache)
def freeze(
    path: Annotated[
        Path | None,
        Argument(help="The file to write. Default: environment.cache.frozen, or tasks/custom/tool_cache.jsonl."),
    ] = None,
) -> list[str]:
    """Write the recorded replies to a file that DVC versions."""
    from tasks.commands import freeze_cache as verb

    return verb.freeze(path)


@command(registry)
def show() -> Any:
    """The recorded champion, differences, holds and last entries."""
    return _registry().show()


@command(registry)
def restore() -> str:
    """Restore aliases and tags from the record."""
    return _registry().restore()


@command(registry)
def adopt(reason: Reason) -> str:
    """Change the record to what MLflow shows now."""
    return _registry().adopt(reason=reason)


@command(registry)
def release(reason: Reason) -> str:
    """Allow promotions again after `rollback --hold`."""
    return _registry().release(reason=reason)


def _run(stage: str, accept_drift: bool = False, **asked: Any) -> str:
    """`asked`: options beyond params.yaml."""
    from tasks.pipeline.order import run_stage

    _accept_drift(accept_drift)
    folder = run_stage(stage, **asked)
    return f"{stage}: results are in {folder} ({', '.join(sorted(item.name for item in folder.iterdir()))})"


def _accept_drift(is_accepted: bool) -> None:
    if is_accepted:
        from tasks.drift.pin import accept_drift_from_now_on

        accept_drift_from_now_on()


def _registry() -> Any:
    from tasks.commands import registry as verb

    return verb


def _pin_hash_seed() -> None:
    """Restart without hash randomisation: the order of a set of strings must be the same in every run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    _pin_hash_seed()
    app()
