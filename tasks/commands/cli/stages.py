"""The stages of the pipeline, one command each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from tasks.commands.cli.options import AcceptDrift, use_accept_drift
from tasks.core.terminal import tell
from tasks.core.workspace import DVC_VARIABLE, as_shell_sees
from tasks.pipeline.cli_command import Debug, command
from tasks.pipeline.cli_errors import DEBUG

stages = typer.Typer()


@command(stages)
def curate() -> None:
    """Validate problems, drop duplicates, split them."""
    for line in _run("curate"):
        tell(line)
    from tasks.commands.doctor.outlook import print_outlook

    print_outlook()


@command(stages)
def assess(accept_drift: AcceptDrift = False) -> list[str]:
    """Measure the base model: does it need a warm start?"""
    return _run("assess", accept_drift)


@command(stages)
def warm_start() -> list[str]:
    """Fine-tune on expert episodes, where that is needed."""
    return _run("warm_start")


@command(stages)
def train(accept_drift: AcceptDrift = False, debug: Debug = False) -> list[str]:
    """Train by reinforcement learning; writes snapshots."""
    given = {"--accept-drift": accept_drift, DEBUG: debug}
    return _run("train", accept_drift, options=[name for name, is_given in given.items() if is_given])


@command(stages)
def evaluate(accept_drift: AcceptDrift = False) -> list[str]:
    """Choose a snapshot on select, confirm it on test."""
    return _run("evaluate", accept_drift)


@command(stages)
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
    from tasks.commands.prefect_events import tell_approval, tell_promotion
    from tasks.stages.promote.overrides import read_override

    override = read_override(force=force, approve=approve, withdraw=withdraw, reason=reason, by=by)
    if override is None or override.kind == "force":
        lines = _run("promote", accept_drift, override=override)
        tell_promotion()
        return lines
    from tasks.commands.answer import carry_out

    lines = carry_out(override)
    if override.kind == "approve":
        tell_approval(lines[0])
    return lines


def _run(stage: str, accept_drift: bool = False, **asked: Any) -> list[str]:
    """`asked`: options beyond params.yaml. Another process may say where the results are."""
    from tasks.pipeline.order import run_stage

    use_accept_drift(accept_drift)
    started_in = dict(os.environ)  # a rank takes the addresses of the others out of it
    folder = run_stage(stage, **asked)
    lines = [] if is_known_to_dvc(stage, started_in) else [_how_dvc_learns(stage)]
    if folder is not None:
        files = ", ".join(sorted(item.name for item in folder.iterdir()))
        lines.insert(0, f"{stage}: results are in {as_shell_sees(folder)} ({files})")
    return lines


def is_known_to_dvc(stage: str, started_in: Mapping[str, str]) -> bool:
    """Whether DVC started it, or need not know: promote, a folder without a pipeline, one rank of a training."""
    from tasks.core.settings import load, read_params
    from tasks.pipeline.launch import LAUNCHED, place_of
    from tasks.pipeline.order import RECORDED, CommonSections
    from tasks.pipeline.outer_launcher import LAUNCH

    if stage not in RECORDED or DVC_VARIABLE in started_in or not Path("dvc.yaml").exists():
        return True
    launch = load(CommonSections, read_params()).launch
    starts_them = launch.launcher == "external" and LAUNCH in started_in
    return stage in LAUNCHED and not starts_them and place_of(launch, started_in) is not None


def _how_dvc_learns(stage: str) -> str:
    return (
        f"{stage}: DVC does not know of these results. `dvc commit -f {stage}` tells it; without that `dvc repro` and "
        f"the flow remove them and run {stage} again"
    )
