"""What is asked before a run: will it work, what does it cost, which settings does it use?"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Argument, Option

from tasks.commands.cli.options import AcceptDrift, use_accept_drift
from tasks.core.terminal import tell
from tasks.pipeline.cli_command import Debug, command

checks = typer.Typer()


@command(checks)
def doctor(accept_drift: AcceptDrift = False, debug: Debug = False) -> Any:
    """Check for what would go wrong in training."""
    from tasks.commands.doctor.doctor import run_doctor

    use_accept_drift(accept_drift)
    return run_doctor(debug=debug)


@command(checks)
def plan(
    model: Annotated[str | None, Option(metavar="NAME", help="A folder, or a known name such as Qwen2.5-7B.")] = None,
    gpu: Annotated[str | None, Option(metavar="NAME", help="Such as h100-80gb or cpu; 24gb: memory alone.")] = None,
    profile: Annotated[list[str] | None, Option(metavar="NAME", help="Not params.yaml; repeat for more.")] = None,
    dollars_per_hour: Annotated[float | None, Option(min=0, help="What the machine costs.")] = None,
    tokens: Annotated[tuple[int, int, int] | None, Option(help="A mean episode: prompt, sampled, replies.")] = None,
    gpus: Annotated[int | None, Option(metavar="N", help="Split N GPUs into trainers and engines.")] = None,
    nodes: Annotated[int, Option(metavar="M", help="Nodes that have them.")] = 1,
    as_json: Annotated[bool, Option("--json", help="Everything, for a program.")] = False,
) -> Any:
    """Memory, time and dollars of a run, before it starts.

    With --gpus instead: which GPUs train and which play, simulated from the records of the last train. Status 1: it
    does not fit.
    """
    if gpus is not None:
        from tasks.commands.plan import cluster

        cluster.check_options(dollars_per_hour)
        simulated = cluster.plan_cluster(gpus, nodes, model, gpu, profile or [], tokens)
        return cluster.cluster_as_json(simulated) if as_json else cluster.print_cluster(simulated)
    from tasks.commands.plan import output
    from tasks.commands.plan import plan as verb

    found = verb.make_plan(model, gpu, profile or [], dollars_per_hour, tokens)
    if as_json:
        tell(verb.as_json(found))
        return found.does_fit
    return output.print_plan(found)


@command(checks)
def profile(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Of infra/profiles; the later over the earlier.")],
) -> list[str]:
    """Rewrite params.yaml from infra/profiles."""
    from tasks.commands.profile import apply_profiles

    return apply_profiles(names)


@command(checks, "judge-check")
def judge_check() -> Any:
    """Measure how far the judge agrees with people.

    Status 1: too little to train with.
    """
    from tasks.commands import judge_check as verb

    return verb.judge_check()


@command(checks, "drift-check")
def drift_check() -> str:
    """Has the environment changed, or the champion fallen?"""
    from tasks.commands import drift_check as verb

    return verb.drift_check()
