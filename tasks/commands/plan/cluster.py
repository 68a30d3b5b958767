"""plan --gpus: how to split N GPUs into trainers and engines, and where the next one goes, by simulation.

Episodes are drawn from a run's records in artifacts/timings. Speeds are that run's, or with --gpu, --model or --profile
those of `planning/simulation/assumed.py`. Memory is not looked at: `plan` without --gpus does that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tasks.commands.plan.plan import choose_machine
from tasks.commands.profile import read_profiles
from tasks.core.progress import spell
from tasks.core.settings import PARAMS_FILE, Settings, load, load_paths, parse_params, read_params
from tasks.models.settings import ModelSettings
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import find_shape, shape_of
from tasks.planning.simulation.allocation import NOWHERE, Next, Row, Search, sizes_to_plan
from tasks.planning.simulation.assumed import HOST_TURN_SECONDS, NODE_BYTES, assumed_speeds, share_weights
from tasks.planning.simulation.cluster import Outcome, simulate
from tasks.planning.simulation.measured import measured_speeds, read_records, recorded_groups
from tasks.planning.simulation.workload import Speeds, Workload, costs_of_group

FEWEST_GPUS = 2
SHARED = f"links of {NODE_BYTES / 1e9:.0f} GB/s in a node and 20 GB/s between nodes"
ASSUMED = (
    f"assumed: speeds of engines and trainers on {{machine}}, {SHARED}, {HOST_TURN_SECONDS * 1000:g} ms of the one "
    f"process of the environments per turn"
)
MEASURED = f"measured: also the speeds of one engine and one trainer, in one process. Assumed: {SHARED}"


class SeedSections(Settings):
    model: ModelSettings
    seed: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`looked_at` are allocations of all the GPUs; `sizes` the best of each size, with where the next GPU goes."""

    gpus: int
    gpus_per_node: int
    head: tuple[str, ...]
    looked_at: list[Row]
    best: Row
    sizes: list[tuple[Row, Next]]

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def plan_cluster(
    gpus: int, nodes: int, model: str | None = None, gpu: str | None = None, profiles: Sequence[str] = ()
) -> ClusterPlan:
    """ValueError for GPUs that no nodes have, for a machine whose speed is not known, and without a run's records."""
    check_sizes(gpus, nodes)
    params = parse_params(read_profiles(profiles), PARAMS_FILE) if profiles else read_params()
    settings, sections = load(PlanSections, params), load(SeedSections, params)
    iterations, episodes = read_records(load_paths(params).artifacts / "timings")
    workload = make_workload(settings, episodes)
    shape = shape_of(sections.model) if model is None else find_shape(model)
    if model is None and gpu is None and not profiles:
        measured = measured_speeds(iterations, episodes, workload)
        setup = Setup(shape, settings, choose_machine(None, settings, shape))
        speeds, told = replace(measured, share_weights=share_weights(setup)), MEASURED
    else:
        setup = Setup(shape, settings, choose_machine(gpu, settings, shape))
        if not setup.machine.rate:
            raise ValueError(
                f"--gpu {gpu}: the speed of {setup.machine.name} is not known, so nothing can be simulated. Name a "
                f"card, such as --gpu h100-80gb."
            )
        speeds, told = assumed_speeds(setup, workload), ASSUMED.format(machine=setup.machine.name)
    search = make_search(settings, workload, speeds, gpus_per_node=gpus // nodes, seed=sections.seed)
    rows = {row.gpus: row for row in search.rows(sizes_to_plan(gpus))}
    looked_at = [
        Row(gpus, one, found) for one, found in search.known.items() if gpus - search.engine_size < one.gpus <= gpus
    ]
    return ClusterPlan(
        gpus=gpus,
        gpus_per_node=gpus // nodes,
        head=(_batch_line(workload), _measured_line(iterations, episodes), told),
        looked_at=sorted(looked_at, key=lambda row: row.allocation.trainers),
        best=rows[gpus],
        sizes=[(row, search.next_gpu(row)) for row in rows.values()],
    )


def check_options(dollars_per_hour: float | None, tokens: tuple[int, int, int] | None) -> None:
    for name, value in {"--dollars-per-hour": dollars_per_hour, "--tokens": tokens}.items():
        if value is not None:
            raise ValueError(
                f"{name} has no part in --gpus, which simulates recorded episodes and counts no dollars, so it would "
                f"be ignored. Leave it out."
            )


def check_sizes(gpus: int, nodes: int) -> None:
    if gpus < FEWEST_GPUS:
        raise ValueError(
            f"--gpus {gpus}: an engine and a trainer of their own need {FEWEST_GPUS} GPUs, so there is nothing to "
            f"split. Ask for {FEWEST_GPUS} or more; `python -m tasks plan` without --gpus plans one."
        )
    if nodes < 1 or gpus % nodes:
        raise ValueError(
            f"--gpus {gpus} --nodes {nodes}: {gpus} GPUs are not the same number on {nodes} nodes, so it is unknown "
            f"which share a node's links. Give nodes that divide them."
        )


def make_workload(settings: PlanSections, episodes: Sequence[dict[str, Any]]) -> Workload:
    train = settings.train
    return Workload(
        groups=recorded_groups(episodes),
        problems=train.problems_per_iteration,
        group_size=train.group_size,
        max_concurrent_episodes=settings.engine.max_concurrent_episodes,
        max_staleness=train.max_staleness,
        packing=train.packing,
        micro_batch_tokens=train.micro_batch_tokens,
    )


def make_search(settings: PlanSections, workload: Workload, speeds: Speeds, *, gpus_per_node: int, seed: int) -> Search:
    trees = max(len(costs_of_group(group, workload)) / len(group) for group in workload.groups)
    return Search(
        partial(simulate, workload, speeds, gpus_per_node=gpus_per_node, seed=seed),
        engine_size=getattr(settings.engine.own, "tensor_parallel_size", 1),
        most_trainers=max(1, round(trees * workload.episodes)),
    )


def _batch_line(workload: Workload) -> str:
    ahead = f"collected {workload.max_staleness} ahead" if workload.max_staleness else "collected in turn"
    return (
        f"a batch: {workload.problems} problems × {workload.group_size} episodes, {ahead}, at most "
        f"{workload.max_concurrent_episodes} at once"
    )


def _measured_line(iterations: Sequence[dict[str, Any]], episodes: Sequence[dict[str, Any]]) -> str:
    turns = [turn for row in episodes for turn in row["turns"]]
    sampled, tools = (sum(turn[name] for turn in turns) / len(turns) for name in ("sampled", "tool_seconds"))
    return (
        f"measured: turns, tokens and tool seconds of {len(episodes):,} episodes of the last train ({len(iterations)} "
        f"iterations); means: {len(turns) / len(episodes):.1f} turns, {sampled:,.0f} sampled tokens, {tools:.3f} s of "
        f"tools per turn"
    )


def print_cluster(plan: ClusterPlan, console: Any = None) -> None:
    from tasks.commands.plan.output import new_table
    from tasks.core.console import SafeConsole

    console = console or SafeConsole()
    for line in (*plan.head, "memory is not simulated: `python -m tasks plan` tells what fits"):
        console.print(line, soft_wrap=True)
    columns = ("iteration", "rollout", "update", "trainers idle", "engines idle", "episodes per hour")
    table = new_table(f"{plan.gpus} GPUs, {plan.gpus_per_node} to a node", *columns)
    for row in plan.looked_at:
        is_best = row.allocation == plan.best.allocation
        table.add_row(_split(row) + ", best" * is_best, *_cells(row.outcome), style="bold" if is_best else None)
    console.print(table)
    sizes = new_table("GPUs", *columns)
    for row, _ in plan.sizes:
        sizes.add_row(f"{row.gpus:,}: {_split(row)}", *_cells(row.outcome))
    console.print(sizes)
    for row, following in plan.sizes:
        console.print(f"{row.gpus:,} GPUs: {_advice(row, following)}", soft_wrap=True)


def _split(row: Row) -> str:
    engine_size = row.allocation.engine_size
    engines = f"{row.allocation.engines} engines" + f" of {engine_size}" * (engine_size > 1)
    return f"{row.allocation.trainers} trainers, {engines}" + f", {row.unused} unused" * (row.unused > 0)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    seconds = (outcome.iteration_seconds, outcome.rollout_seconds, outcome.update_seconds)
    idle = (outcome.trainer_idle, outcome.engine_idle)
    return (
        *(spell(value) if value >= 100 else f"{value:.3g} s" for value in seconds),
        *(f"{share:.0%}" for share in idle),
        f"{outcome.episodes_per_hour:,.0f}",
    )


def _advice(row: Row, following: Next) -> str:
    if following.where == NOWHERE:
        return "the next gains nothing: one trainer or engine more saves less than 0.5% of an iteration"
    seconds = following.outcome.iteration_seconds
    return f"the next to the {following.where}: −{following.gain:.1%}, {seconds:.3g} s per iteration"


def cluster_as_json(plan: ClusterPlan) -> str:
    return json.dumps(plan.as_row(), indent=1)
