"""plan --gpus: how to split N GPUs into trainers and engines, and where the next one goes, by simulation.

Episodes are drawn from a run's records in artifacts/timings; --tokens gives them other lengths. Speeds are that run's,
or with --gpu, --model or --profile those of `planning/simulation/assumed.py`. Memory is not looked at: `plan` without
--gpus does that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from tasks.commands.plan.plan import check_tokens, choose_machine
from tasks.commands.profile import read_profiles
from tasks.core.progress import spell
from tasks.core.settings import PARAMS_FILE, Settings, load, load_paths, parse_params, read_params
from tasks.core.text import counted
from tasks.models.settings import ModelSettings
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import find_shape, shape_of
from tasks.planning.simulation.allocation import LEAST_GAIN, NOWHERE, Next, Row, Search, sizes_to_plan
from tasks.planning.simulation.assumed import HOST_TURN_SECONDS, NODE_BYTES, assumed_speeds, share_weights
from tasks.planning.simulation.cluster import Outcome, simulate
from tasks.planning.simulation.measured import (
    WARM_UP,
    Records,
    mean_tokens,
    measured_speeds,
    read_records,
    recorded_groups,
    scale_groups,
)
from tasks.planning.simulation.workload import Allocation, Speeds, Workload, costs_of_group

FEWEST_GPUS = 2
SHARED = f"links of {NODE_BYTES / 1e9:.0f} GB/s in a node and 20 GB/s between nodes"
ASSUMED = (
    f"assumed, and measured on no GPU: speeds of engines and trainers on {{machine}}, {SHARED}, "
    f"{HOST_TURN_SECONDS * 1000:g} ms of the one process of the environments per turn"
)
MEASURED = (
    f"measured in that run, on no GPU unless it had one: speeds of its engine, its trainer and the process of the "
    f'environments, each given to every "GPU". Assumed: {SHARED}'
)
NOTES = (
    "memory is not simulated: `python -m tasks plan` tells what fits",
    "a split is written trainers + engines; idle is the share of an iteration in which they have nothing to do",
)
STREAMED_BATCHES = 2  # under way, of the streaming that is compared


class SeedSections(Settings):
    model: ModelSettings
    seed: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`looked_at` are allocations of all the GPUs; `sizes` the best of each size, with where the next GPU goes;
    `ways` to collect, with the best split of `gpus`.
    """

    gpus: int
    gpus_per_node: int
    head: tuple[str, ...]
    looked_at: list[Row]
    best: Row
    sizes: list[tuple[Row, Next]]
    ways: dict[str, Outcome]

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def plan_cluster(
    gpus: int,
    nodes: int,
    model: str | None = None,
    gpu: str | None = None,
    profiles: Sequence[str] = (),
    tokens: tuple[int, int, int] | None = None,
) -> ClusterPlan:
    """ValueError for GPUs that no nodes have, for a machine whose speed is not known, and without a run's records."""
    check_sizes(gpus, nodes)
    params = parse_params(read_profiles(profiles), PARAMS_FILE) if profiles else read_params()
    settings, sections = load(PlanSections, params), load(SeedSections, params)
    check_tokens(tokens, settings.sampling)
    records = read_records(load_paths(params).artifacts / "timings")
    recorded = make_workload(settings, records)
    workload = replace(recorded, groups=scale_groups(recorded.groups, tokens)) if tokens else recorded
    shape = shape_of(sections.model) if model is None else find_shape(model)
    check: tuple[str, ...] = ()
    if model is None and gpu is None and not profiles:
        measured = measured_speeds(records, recorded, in_process=not settings.engine.own.has_own_memory)
        setup = Setup(shape, settings, choose_machine(None, settings, shape))
        check = (_check_line(records, recorded, measured, seed=sections.seed),)
        own = replace(measured, engine=replace(measured.engine, in_process=False), slowed_beside=0.0)
        speeds, told = replace(own, share_weights=share_weights(setup)), MEASURED
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
    best = rows[gpus].allocation
    ways = {
        name: simulate(way, speeds, best, gpus_per_node=gpus // nodes, seed=sections.seed)
        for name, way in ways_to_collect(workload).items()
    }
    return ClusterPlan(
        gpus=gpus,
        gpus_per_node=gpus // nodes,
        head=(_batch_line(workload), *_episode_lines(records, recorded, tokens), told, _fixed_line(speeds), *check),
        looked_at=sorted(looked_at, key=lambda row: row.allocation.trainers),
        best=rows[gpus],
        sizes=[(row, search.next_gpu(row)) for row in rows.values()],
        ways=ways,
    )


def check_options(dollars_per_hour: float | None) -> None:
    if dollars_per_hour is not None:
        raise ValueError(
            "--dollars-per-hour has no part in --gpus, which counts no dollars, so it would be ignored. Leave it out."
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


def make_workload(settings: PlanSections, records: Records) -> Workload:
    train = settings.train
    return Workload(
        groups=recorded_groups(records.turns),
        problems=train.problems_per_iteration,
        group_size=train.group_size,
        max_concurrent_episodes=settings.engine.max_concurrent_episodes,
        max_staleness=train.max_staleness,
        packing=train.packing,
        micro_batch_tokens=train.micro_batch_tokens,
        groups_under_way=train.streaming.groups_under_way if train.streaming else None,
    )


def ways_to_collect(workload: Workload) -> dict[str, Workload]:
    ahead = max(1, workload.max_staleness)
    under_way = workload.groups_under_way or STREAMED_BATCHES * workload.problems
    return {
        "in turn (train.max_staleness 0)": replace(workload, max_staleness=0, groups_under_way=None),
        f"{ahead} ahead (train.max_staleness {ahead})": replace(workload, max_staleness=ahead, groups_under_way=None),
        f"streaming, {under_way} groups under way": replace(workload, max_staleness=ahead, groups_under_way=under_way),
    }


def make_search(settings: PlanSections, workload: Workload, speeds: Speeds, *, gpus_per_node: int, seed: int) -> Search:
    trees = max(len(costs_of_group(group, workload)) / len(group) for group in workload.groups)
    return Search(
        partial(simulate, workload, speeds, gpus_per_node=gpus_per_node, seed=seed),
        engine_size=settings.gpus_per_engine,
        most_trainers=max(1, round(trees * workload.episodes)),
    )


def _batch_line(workload: Workload) -> str:
    ahead = f"collected {workload.max_staleness} ahead" if workload.max_staleness else "collected in turn"
    if workload.groups_under_way:
        ahead = f"streaming from {counted(workload.groups_under_way, 'group')} under way"
    return (
        f"a batch: {counted(workload.problems, 'problem')} × {counted(workload.group_size, 'episode')}, {ahead}, at "
        f"most {workload.max_concurrent_episodes} at once"
    )


def _episode_lines(records: Records, workload: Workload, tokens: tuple[int, int, int] | None) -> list[str]:
    turns = [turn for row in records.turns for turn in row["turns"]]
    count, iterations = len(records.turns), len(records.train)
    prompt, sampled, replies = mean_tokens(workload.groups)
    lines = [
        f"measured: {count:,} episodes of the last run ({iterations} iterations); means: {len(turns) / count:.1f} "
        f"turns, {prompt:,.0f} tokens of prompt, {sampled:,.0f} sampled, {replies:,.0f} of replies, "
        f"{sum(turn['tool_seconds'] for turn in turns) / len(turns):.3f} s of tools per turn"
    ]
    if tokens is not None:
        told = "{:,} of prompt, {:,} sampled, {:,} of replies".format(*tokens)
        lines.append(f"assumed: the lengths of --tokens ({told}), as unequal as those of these episodes")
    return lines


def _fixed_line(speeds: Speeds) -> str:
    behind = f", which writes {_seconds(speeds.write)} more behind what follows" if speeds.write else ""
    return (
        f"beside rollout and update, per iteration: {_seconds(speeds.refresh)} to give the engines new weights, "
        f"{_seconds(speeds.save)} to save{behind}"
    )


def _check_line(records: Records, workload: Workload, speeds: Speeds, *, seed: int) -> str:
    """The run that left the records, as it was run: one trainer and one engine."""
    seconds = [row["iteration_seconds"] for row in records.train[WARM_UP:]]
    found = simulate(workload, speeds, Allocation(1, 1), gpus_per_node=1, seed=seed).iteration_seconds
    return (
        f"check: that run as simulated takes {found:.3g} s per iteration, and took {mean(seconds):.3g} s "
        f"({found / mean(seconds) - 1:+.0%}). How far off others were: infra/benchmarks.md, Simulated GPUs"
    )


def print_cluster(plan: ClusterPlan, console: Any = None) -> None:
    from tasks.commands.plan.output import new_table
    from tasks.core.console import SafeConsole

    console = console or SafeConsole()
    for line in (*plan.head, *NOTES):
        console.print(line, soft_wrap=True)
    seconds = ("iteration", "rollout", "update", "idle")
    table = new_table(f"{plan.gpus:,} GPUs, {plan.gpus_per_node} to a node", *seconds, "episodes per hour")
    for row in plan.looked_at:
        is_best = row.allocation == plan.best.allocation
        cells = (*_cells(row.outcome), f"{row.outcome.episodes_per_hour:,.0f}")
        table.add_row(_split(row) + ", best" * is_best, *cells, style="bold" if is_best else None)
    console.print(table)
    sizes = new_table("GPUs, best split", *seconds, "next GPU")
    for row, following in plan.sizes:
        sizes.add_row(f"{row.gpus:,}: {_split(row)}", *_cells(row.outcome), _advice(following))
    console.print(sizes)
    ways = new_table(f"{plan.gpus:,} GPUs, {_split(plan.best)}", *seconds)
    for name, outcome in plan.ways.items():
        ways.add_row(name, *_cells(outcome))
    console.print(ways)


def _split(row: Row) -> str:
    engine_size = row.allocation.engine_size
    engines = f"{row.allocation.engines:,}" + f" of {engine_size}" * (engine_size > 1)
    return f"{row.allocation.trainers:,} + {engines}" + f", {row.unused:,} unused" * (row.unused > 0)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    seconds = (outcome.iteration_seconds, outcome.rollout_seconds, outcome.update_seconds)
    return (*map(_seconds, seconds), f"{outcome.trainer_idle:.0%} + {outcome.engine_idle:.0%}")


def _seconds(value: float) -> str:
    return spell(value) if value >= 100 else f"{value:.3g} s"


def _advice(following: Next) -> str:
    return f"gains < {LEAST_GAIN:.1%}" if following.where == NOWHERE else f"{following.where} −{following.gain:.1%}"


def cluster_as_json(plan: ClusterPlan) -> str:
    return json.dumps(plan.as_row(), indent=1)
