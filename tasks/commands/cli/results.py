"""What is made of a run: pages, comparisons, verdicts and files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tasks.commands.cli.options import AcceptDrift, use_accept_drift
from tasks.pipeline.cli_command import command

results = typer.Typer()


@command(results)
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


@command(results)
def ablate(
    iterations: Annotated[
        int | None, Option("--iterations", min=1, metavar="N", help="Of each run. Default: those of params.yaml.")
    ] = None,
    seeds: Annotated[int, Option("--seeds", min=1, metavar="N", help="Training seeds per variant.")] = 1,
    only: Annotated[list[str] | None, Option("--only", metavar="NAME", help="A variant; repeat for more.")] = None,
    accept_drift: AcceptDrift = False,
) -> None:
    """Train and compare the variants of infra/ablation.yaml."""
    from tasks.commands.ablate.ablate import run_ablation

    use_accept_drift(accept_drift)
    run_ablation(only=only or [], num_seeds=seeds, num_iterations=iterations)


@command(results)
def score(
    environment: Annotated[str, Option("--environment", metavar="NAME", help="A folder of tasks/environments.")],
    calls: Annotated[
        str, Option("--calls", metavar="FILE", help="JSONL, see tasks/environments/README.md; - is stdin.")
    ],
) -> Any:
    """Play recorded calls, and judge them."""
    from tasks.commands import score as verb

    return verb.score(environment, calls)


@command(results)
def rescore(
    file: Annotated[str, Argument(metavar="FILE", help="Stored trajectories (JSONL).")],
    out: Annotated[
        Path | None, Option("--out", metavar="FILE", help="A new file; default: artifacts/rescore/.")
    ] = None,
) -> None:
    """Score stored trajectories with today's reward."""
    from tasks.commands import rescore as verb
    from tasks.core.terminal import tell
    from tasks.storage.inputs import copy_argument

    tell("\n".join(verb.rescore(copy_argument(file), out)))


@command(results)
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


@command(results, "evaluate-snapshot")
def evaluate_snapshot(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="A snapshot's name, a model folder, models:/NAME@alias or an s3:// URL.")
    ],
    accept_drift: AcceptDrift = False,
) -> None:
    """Play any model on select, never on test."""
    from tasks.commands import evaluate_snapshot as verb
    from tasks.core.console import SafeConsole

    use_accept_drift(accept_drift)
    SafeConsole().print(verb.table_of(verb.evaluate_snapshot(source)))


@command(results)
def harvest(
    source: Annotated[Path, Argument(metavar="SOURCE", help="What `serve --record` wrote, or a JSONL file of chats.")],
    out: Annotated[Path, Argument(metavar="OUT", help="A JSONL file of problems; what it has stays.")],
    checker: Annotated[
        str | None, Option("--checker", metavar="OBJECT", help="tasks.custom.module:function. Default: the judge.")
    ] = None,
) -> None:
    """Recorded conversations as problems for curate."""
    from tasks.commands.harvest import harvest as verb
    from tasks.core.console import SafeConsole

    SafeConsole().print(verb.harvest(source, out, checker=checker))
