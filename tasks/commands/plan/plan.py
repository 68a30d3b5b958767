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
from tasks.planning.hardware import GPUS, Machine, amount, find_gpu, measured, this_machine
from tasks.planning.memory import Memory, plan_memory
from tasks.planning.nearest import arithmetic, describe, fits, nearest_that_fits
from tasks.planning.seconds import Lengths, Seconds, assumed_lengths, plan_seconds
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import Shape, find_shape, shape_of
from tasks.stages.curate.settings import CurateSettings
from tasks.stages.evaluate.settings import EvaluateSettings

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole


class EvaluationSections(Settings):
    model: ModelSettings
    curate: CurateSettings
    evaluate: EvaluateSettings


@dataclass(frozen=True, slots=True)
class Plan:
    setup: Setup
    lengths: Lengths
    memory: Memory
    seconds: Seconds
    fits_on: dict[str, str]  # machine: "yes", or the settings with which it fits, or "no"

    def as_row(self) -> dict[str, Any]:
        """Everything, for a program."""
        machine, seconds = self.setup.machine, self.seconds
        return {
            "model": asdict(self.setup.shape),
            "machine": {**asdict(machine), "rate": dict(machine.rate)},
            "lengths": asdict(self.lengths),
            "memory": {**{part.name: asdict(part) for part in self.memory.parts}, "peak": self.memory.peak},
            "fits": fits(self.setup),
            "fits_on": self.fits_on,
            "seconds": {**asdict(seconds), "iteration": seconds.iteration, "total": seconds.total},
            "tokens_per_day": seconds.tokens_per_day,
            "dollars": seconds.dollars(machine.dollars_per_hour),
        }


def make_plan(
    model: str | None = None,
    gpu: str | None = None,
    profiles: Sequence[str] = (),
    dollars_per_hour: float | None = None,
    tokens: tuple[int, int, int] | None = None,
) -> Plan:
    """ValueError for a model, a machine or a profile that is not known."""
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
    seconds = plan_seconds(setup, lengths, evaluated_episodes=episodes)
    return Plan(setup, lengths, plan_memory(setup), seconds, _fits_on(setup))


def _machine(gpu: str | None, settings: PlanSections, shape: Shape) -> Machine:
    """The one that is named, or the one that `compute.device` means here."""
    if gpu not in (None, "cpu"):
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
        changes = nearest_that_fits(replace(setup, machine=machine))
        told[name] = "no" if changes is None else f"with {describe(changes)}" if changes else "yes"
    return told


def print_plan(plan: Plan, console: SafeConsole | None = None) -> bool:
    """Whether it fits."""
    from tasks.core.console import SafeConsole

    console = console or SafeConsole()
    shape, machine = plan.setup.shape, plan.setup.machine
    told = f"{shape.name} ({shape.num_parameters / 1e9:,.2f} billion weights) on {machine.name}"
    console.print(f"{told} with {amount(machine.memory)}")
    console.print(_memory_table(plan.memory))
    console.print(_seconds_table(plan))
    if not machine.is_gpu and fits(plan.setup):
        return True
    console.print(_fits_table(plan))
    if not fits(plan.setup):
        console.print(f"does not fit: {arithmetic(plan.memory)}", soft_wrap=True)
    return fits(plan.setup)


def _memory_table(memory: Memory) -> Any:
    table = _table("Memory", *memory.phases, "on the host")
    for part in memory.parts:
        table.add_row(part.name, *(_size(value) for value in (part.rollout, part.update, part.save, part.host)))
    table.add_row("all", *(_size(value) for value in (*memory.phases.values(), memory.host)), style="bold")
    return table


def _seconds_table(plan: Plan) -> Any:
    seconds, lengths = plan.seconds, plan.lengths
    table = _table("Time", "", "")
    for name in ("rollout", "reference", "update", "refresh", "checkpoint"):
        table.add_row(name, _time(getattr(seconds, name)), "an iteration")
    table.add_row("train", _time(seconds.train), f"{seconds.num_iterations:,} iterations")
    table.add_row("evaluate", _time(seconds.evaluate), "all snapshots on select, three models on test")
    assumed = f"prompt {lengths.prompt:,.0f}, sampled {lengths.sampled:,.0f}, replies {lengths.replies:,.0f}"
    table.add_row("sampled tokens a day", f"{seconds.tokens_per_day:,.0f}", f"episodes of {assumed}")
    per_hour = plan.setup.machine.dollars_per_hour
    table.add_row("dollars", f"{seconds.dollars(per_hour):,.2f}", f"at {per_hour:.2f} an hour, an assumed price")
    return table


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
