"""plan: does it fit, how long does it take, what does it cost? Before anything is downloaded or started.

Reads params.yaml or profiles, a model's config.json or a known name, and figures of a machine. Which of its constants
were measured, and on what, is in `tasks/planning/`: everything of a GPU is a published peak times an assumed share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.commands.doctor.estimates import evaluated_episodes
from tasks.commands.profile import read_profiles
from tasks.core.progress import spell
from tasks.core.settings import PARAMS_FILE, Settings, load, parse_params, read_params
from tasks.models.settings import ModelSettings
from tasks.planning.hardware import GPUS, Machine, amount, find_gpu, measured, this_machine, total_memory
from tasks.planning.memory import Memory, plan_memory, warm_start_bytes
from tasks.planning.nearest import TIGHT, arithmetic, describe, fits, nearest_that_fits
from tasks.planning.seconds import Lengths, Seconds, assumed_lengths, plan_seconds
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import KNOWN, Shape, find_shape, shape_of
from tasks.stages.assess.settings import AssessSettings
from tasks.stages.curate.settings import CurateSettings
from tasks.stages.evaluate.settings import EvaluateSettings

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole


ESTIMATE = {
    True: "An estimate: no GPU figure was measured; published peaks × assumed shares.",
    False: "An estimate: the matrix rate is this processor's, every share and overhead is the demo's.",
}
WORST_CASE = "the budget of sampling, the worst case; give --tokens PROMPT SAMPLED REPLIES"


class EvaluationSections(Settings):
    model: ModelSettings
    assess: AssessSettings
    curate: CurateSettings
    evaluate: EvaluateSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` is None where it does not fit and where the machine's speed is not known."""

    setup: Setup
    lengths: Lengths
    memory: Memory
    seconds: Seconds | None
    fits_on: dict[str, str]  # machine: "yes", "tight", the settings with which it fits, or "no"
    warm_start: float | None  # bytes, where a warm start may train all weights of a run with LoRA
    head: tuple[str, ...]  # what was planned, in lines for people
    is_own_price: bool

    def as_row(self) -> dict[str, Any]:
        """Everything, for a program."""
        machine, seconds = self.setup.machine, self.seconds
        return {
            "model": asdict(self.setup.shape),
            "estimate": ESTIMATE[machine.is_gpu],
            "machine": {**asdict(machine), "rate": dict(machine.rate)},
            "lengths": asdict(self.lengths),
            "memory": {**{part.name: asdict(part) for part in self.memory.parts}, "peak": self.memory.peak},
            "fits": fits(self.setup),
            "fits_on": self.fits_on,
            "warm_start": self.warm_start,
            "seconds": seconds and {**asdict(seconds), "iteration": seconds.iteration, "total": seconds.total},
            "tokens_per_day": seconds and seconds.tokens_per_day,
            "dollars": seconds and seconds.dollars(machine.dollars_per_hour),
        }


def make_plan(
    model: str | None = None,
    gpu: str | None = None,
    profiles: Sequence[str] = (),
    dollars_per_hour: float | None = None,
    tokens: tuple[int, int, int] | None = None,
) -> Plan:
    """ValueError for a model, a machine or a profile that is not known, and for lengths that no episode has."""
    if tokens is not None and (min(tokens[:2]) < 1 or tokens[2] < 0):
        raise ValueError(
            f"--tokens {' '.join(map(str, tokens))}: no episode has these lengths, so no time follows from them. Give "
            f"at least 1 token of prompt, 1 sampled and 0 of replies."
        )
    params = parse_params(read_profiles(profiles), PARAMS_FILE) if profiles else read_params()
    settings, sections = load(PlanSections, params), load(EvaluationSections, params)
    shape = shape_of(sections.model) if model is None else find_shape(model)
    machine = _machine(gpu, settings, shape)
    if dollars_per_hour is not None:
        machine = replace(machine, dollars_per_hour=dollars_per_hour)
    setup = Setup(shape, settings, machine)
    lengths = assumed_lengths(setup) if tokens is None else Lengths(*tokens, longest=tokens[1] + tokens[2])
    sizes = {"select": sections.curate.max_select_problems, "test": sections.curate.max_test_problems}
    episodes = evaluated_episodes(settings.train, sections.evaluate, sizes)
    is_timed = fits(setup) and bool(machine.rate)
    return Plan(
        setup=setup,
        lengths=lengths,
        memory=plan_memory(setup),
        seconds=plan_seconds(setup, lengths, evaluated_episodes=episodes) if is_timed else None,
        fits_on=_fits_on(setup),
        warm_start=warm_start_bytes(setup) if sections.assess.warm_start_below > 0 else None,
        head=_head(setup, model, profiles, None if tokens is None else lengths),
        is_own_price=dollars_per_hour is not None,
    )


def _machine(gpu: str | None, settings: PlanSections, shape: Shape) -> Machine:
    """The one that is named, or the one that `compute.device` means here."""
    if gpu is not None and gpu.lower() != "cpu":
        return find_gpu(gpu)
    compute = settings.compute if gpu is None else settings.compute.model_copy(update={"device": "cpu"})
    machine = this_machine(compute)
    if not machine.is_gpu and compute.device == "cuda":
        raise ValueError(
            f"compute.device is cuda and there is no GPU here, so there is nothing to plan for. Name one: --gpu "
            f"{', '.join(GPUS)} or cpu."
        )
    return measured(machine, hidden=shape.hidden, inner=shape.inner, num_threads=compute.num_threads)


def _fits_on(setup: Setup) -> dict[str, str]:
    told = {}
    for name, machine in GPUS.items():
        there = replace(setup, machine=machine)
        changes = nearest_that_fits(there)
        as_it_is = "tight" if is_tight(there) else "yes"
        told[name] = "no" if changes is None else f"with {describe(changes)}" if changes else as_it_is
    return told


def is_tight(setup: Setup) -> bool:
    return plan_memory(setup).peak > TIGHT * setup.machine.memory


def _head(setup: Setup, model: str | None, profiles: Sequence[str], lengths: Lengths | None) -> tuple[str, ...]:
    """Which model, settings and lengths."""
    shape, compute, lora = setup.shape, setup.settings.compute, setup.settings.train.lora
    kind = f"LoRA, {compute.frozen} base" if lora else f"full, {compute.weights}"
    source = f"profile {' with '.join(profiles)}" if profiles else PARAMS_FILE
    told = f"{lengths.prompt:,.0f} of prompt, {lengths.sampled:,.0f} sampled, " if lengths else WORST_CASE
    by_name = model is not None and shape.name in KNOWN and model.lower() != shape.name.lower()
    return (
        f"{shape.name} ({_weights(shape.num_parameters)}) on {_machine_line(setup.machine)}",
        *([f"{model}: no such folder, planned by its name"] if by_name else []),
        f"settings of {source}: {kind}, engine {setup.settings.engine.name}",
        f"lengths: {told}{f'{lengths.replies:,.0f} of replies' if lengths else ''}",
        ESTIMATE[setup.machine.is_gpu],
    )


def _weights(number: int) -> str:
    return f"{number / 1e9:,.2f} billion weights" if number >= 1e8 else f"{number / 1e6:,.2f} million weights"


def _machine_line(machine: Machine) -> str:
    if machine.is_gpu:
        return f"{machine.name} with {amount(machine.memory)}"
    return f"{machine.name}, {amount(machine.memory)} free of {amount(total_memory())}"


def print_plan(plan: Plan, console: SafeConsole | None = None) -> bool:
    """Whether it fits."""
    from tasks.core.console import SafeConsole

    console = console or SafeConsole()
    does_fit = fits(plan.setup)
    for line in (_verdict(plan), *plan.head, *_warm_start_line(plan)):
        console.print(line, soft_wrap=True)
    console.print(_memory_table(plan.memory))
    if plan.seconds:
        console.print(_seconds_table(plan, plan.seconds))
    elif does_fit:
        console.print("time and dollars: unknown for this card")
    if plan.setup.machine.is_gpu or not does_fit:
        console.print(_fits_table(plan))
    return does_fit


def _verdict(plan: Plan) -> str:
    setup, memory = plan.setup, plan.memory
    if not fits(setup):
        return f"does not fit: {arithmetic(memory)}"
    told = f"{amount(memory.peak)} of {amount(setup.machine.memory)}"
    return f"tight: {told}, and an estimate is no promise" if is_tight(setup) else f"fits: {told}"


def _warm_start_line(plan: Plan) -> list[str]:
    if plan.warm_start is None:
        return []
    return [f"a warm start would train all weights: {amount(plan.warm_start)}; set assess.warm_start_below: 0.0"]


def _memory_table(memory: Memory) -> Any:
    table = _table("Memory", *memory.phases, "on the host")
    for part in memory.parts:
        table.add_row(part.name, *(_size(value) for value in (part.rollout, part.update, part.save, part.host)))
    table.add_row("all", *(_size(value) for value in (*memory.phases.values(), memory.host)), style="bold")
    return table


def _seconds_table(plan: Plan, seconds: Seconds) -> Any:
    table = _table("Time", "", "")
    for name in ("rollout", "reference", "update", "refresh", "checkpoint"):
        table.add_row(name, _time(getattr(seconds, name)), "")
    table.add_row("one iteration", _time(seconds.iteration), "all of the above")
    table.add_row("train", _time(seconds.train), f"{seconds.num_iterations:,} iterations")
    table.add_row("evaluate", _time(seconds.evaluate), "all snapshots on select, three models on test")
    table.add_row("sampled tokens a day", count(seconds.tokens_per_day), "while training")
    per_hour = plan.setup.machine.dollars_per_hour
    price = "" if plan.is_own_price else ", an assumed price"
    table.add_row("dollars", dollars(seconds.dollars(per_hour)), f"at {per_hour:.2f} an hour{price}")
    return table


def count(value: float) -> str:
    """Two digits: `850`, `12k`, `1.3M`."""
    value = float(f"{value:.1e}")
    for unit in ("", "k", "M"):
        if value < 1000 or unit == "M":
            break
        value /= 1000
    return f"{value:,.1f}{unit}" if unit and value < 10 else f"{value:,.0f}{unit}"


def dollars(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _fits_table(plan: Plan) -> Any:
    table = _table("Fits on", "")
    for name, told in plan.fits_on.items():
        table.add_row(name, told)
    return table


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(Text(columns[0], "bold"), no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, header_style="dim", overflow="fold", justify="left" if not name else "right")
    return table


def _size(value: float) -> str:
    return amount(value) if value else ""


def _time(value: float) -> str:
    return spell(value) if value >= 1 else f"{value:.2f} s" if value else ""


def as_json(plan: Plan) -> str:
    return json.dumps(plan.as_row(), indent=1)
