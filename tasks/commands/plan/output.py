"""A plan as people read it: the verdict, what was planned, and tables of memory, time and cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.commands.plan.plan import Plan, is_tight, train_seconds
from tasks.core.progress import span, spell
from tasks.core.text import counted
from tasks.planning.hardware import amount
from tasks.planning.nearest import arithmetic, longest_episode, warm_start_remedy
from tasks.planning.parts import Memory
from tasks.planning.seconds import Seconds

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole
    from tasks.learning.shared.settings import SupervisedSettings
    from tasks.stages.train.outlook import Outlook


def print_plan(plan: Plan, console: SafeConsole | None = None) -> bool:
    """Whether it fits."""
    from tasks.core.console import SafeConsole
    from tasks.stages.train.outlook import warning_of

    console = console or SafeConsole()
    for line in (*_verdict(plan), *plan.head, *_warm_start_line(plan), _longest_line(plan)):
        console.print(line, soft_wrap=True)
    console.print(_memory_table(plan.memory))
    if plan.seconds:
        console.print(_seconds_table(plan, plan.seconds))
    elif plan.does_fit:
        console.print("time and dollars: unknown for this card")
    if plan.outlook is not None:
        console.print(_signal_table(plan, plan.outlook))
        if sentence := warning_of(plan.setup.settings.train, plan.outlook):
            console.print(f"warning: {sentence}", soft_wrap=True)
    if plan.setup.machine.is_gpu or not plan.does_fit:
        console.print(_fits_table(plan))
    return plan.does_fit


def _verdict(plan: Plan) -> list[str]:
    setup, memory = plan.setup, plan.memory
    too_large = [arithmetic(memory)] if memory.peak > setup.machine.memory else []
    if faults := [*too_large, *([plan.share_fault] if plan.share_fault else [])]:
        return [f"does not fit: {fault}" for fault in faults]
    if plan.is_warm_start_too_large:
        return ["the warm start does not fit, the rest does"]
    told = f"{amount(memory.peak)} of {amount(setup.machine.memory)}"
    return [f"tight: {told}, and an estimate is no promise" if is_tight(setup) else f"fits: {told}"]


def _warm_start_line(plan: Plan) -> list[str]:
    if plan.warm_start is None or plan.warm_start <= plan.memory.peak:
        return []
    told = f"a warm start would train all weights: {amount(plan.warm_start)} of {amount(plan.setup.machine.memory)}"
    return [f"{told}. {warm_start_remedy(plan.setup)}" if plan.is_warm_start_too_large else told]


def _longest_line(plan: Plan) -> str:
    told = f"memory would do for episodes of {count(longest_episode(plan.setup))} tokens, one trainer computing each"
    return f"{told}; sampling.max_tokens_per_episode is {plan.setup.settings.sampling.max_tokens_per_episode:,}"


def _memory_table(memory: Memory) -> Any:
    table = new_table("Memory", *memory.phases, "on the host")
    for part in memory.parts:
        sizes = (part.rollout, part.update, part.save, part.evaluate, part.host)
        table.add_row(part.name, *map(_size, sizes))
    table.add_row("all", *(_size(value) for value in (*memory.phases.values(), memory.host)), style="bold")
    return table


def _seconds_table(plan: Plan, seconds: Seconds) -> Any:
    table = new_table("Time", "", "")
    for name in ("rollout", "reference", "update", "refresh", "checkpoint"):
        table.add_row(name, _time(getattr(seconds, name)), "")
    table.add_row("one iteration", _time(seconds.iteration), "all of the above")
    if seconds.warm_start:
        told = f"{_steps(plan.setup.settings.warm_start)}, if the base model needs them"
        table.add_row("warm start", span(_time, seconds.warm_start, seconds.warm_start_most), told)
    table.add_row("train", _time(seconds.train), counted(seconds.num_iterations, "iteration"))
    table.add_row("evaluate", _time(seconds.evaluate), f"at most {count(plan.evaluated_episodes)} episodes")
    table.add_row("sampled tokens a day", count(seconds.tokens_per_day), "while training")
    per_hour = plan.setup.machine.dollars_per_hour
    price = "" if plan.is_own_price else ", an assumed price"
    table.add_row("dollars", span(dollars, *seconds.dollars(per_hour)), f"at {per_hour:.2f} an hour{price}")
    return table


def _signal_table(plan: Plan, outlook: Outlook) -> Any:
    """The same problems with groups of several sizes, from episodes of the model that training starts from."""
    columns = ("groups without", "episodes per useful one", "episodes", "sampled tokens", "train")
    table, set_sizes = new_table("Signal", *columns), outlook.planned.num_iterations
    for row in outlook.rows:
        told = f"G = {row.group_size}" + ", recommended" * (row.group_size == outlook.recommended)
        seconds = train_seconds(plan, group_size=row.group_size, episodes=row.episodes)
        table.add_row(
            told + ", as set" * ([*set_sizes] == [row.group_size]),
            f"{row.without_signal:.0%}",
            "–" if row.episodes_per_useful_group is None else f"{row.episodes_per_useful_group:,.0f}",
            count(row.episodes),
            count(row.sampled_tokens),
            "" if seconds is None else _time(seconds),
        )
    if len(set_sizes) > 1:
        planned = outlook.planned
        told = f"{planned.sizes}, as scheduled"
        seconds = train_seconds(plan, group_size=None, episodes=planned.episodes)
        table.add_row(
            told,
            f"{planned.without_signal:.0%}",
            "",
            count(planned.episodes),
            count(planned.sampled_tokens),
            "" if seconds is None else _time(seconds),
        )
    return table


def count(value: float) -> str:
    """Two digits: `850`, `12k`, `1.3M`."""
    value = float(f"{value:.1e}")
    for unit in ("", "k", "M"):
        if value < 1000 or unit == "M":
            break
        value /= 1000
    return f"{value:,.1f}{unit}" if unit and value < 10 else f"{value:,.0f}{unit}"


def _steps(own: SupervisedSettings) -> str:
    """`500 steps, up to 3 times`"""
    times = own.stop.max_attempts if own.stop else 1
    return counted(own.num_steps, "step") + (f", up to {times} times" if times > 1 else "")


def dollars(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _fits_table(plan: Plan) -> Any:
    table = new_table("Fits on", "")
    for name, told in plan.fits_on.items():
        table.add_row(name, told)
    return table


def new_table(*columns: str) -> Any:
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
