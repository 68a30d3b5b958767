"""The trainer's figures as tables in a terminal: targets met and missed, ways to compute the train step, growth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.packing import TREE
from tests.benchmarks.scaling import PARTS

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be: at least or at most a number. A goal is aimed at, not promised."""

    key: str
    label: str
    bound: float
    is_ceiling: bool = False
    is_goal: bool = False
    unit: str = "×"

    def row(self, value: float | None) -> tuple[str, str, str, str]:
        """Its line of the table: what it is, the target, the figure, the verdict."""
        wanted = f"{'goal ' if self.is_goal else ''}{'≤' if self.is_ceiling else '≥'} {self._number(self.bound)}"
        if value is None:
            return self.label, wanted, "not measured", ""
        is_met = value <= self.bound if self.is_ceiling else value >= self.bound
        return self.label, wanted, self._number(value), "[green]met[/]" if is_met else "[bold red]missed[/]"

    def _number(self, value: float) -> str:
        if self.unit == "%":
            return f"{value:.1%}"
        return f"{value:,.0f}{self.unit}" if value >= 100 else f"{value:.2f}{self.unit}"


TARGETS = (
    Target("trl_step_ratio", "GRPO batch of the demo, faster than TRL's", 4.0),
    Target("tree_packing_speedup", "tree-packed step, faster than causal rows", 3.0),
    Target("tree_packing_memory_ratio", "its peak memory, of theirs", 0.40, is_ceiling=True),
    Target("environment_share", "environment and reward, of an iteration", 0.02, is_ceiling=True, unit="%"),
    Target("checkpoint_share", "checkpoints, of an iteration", 0.02, is_ceiling=True, unit="%"),
    Target("floor_share", "arithmetic floor, of an iteration", 0.40, is_goal=True, unit="%"),
    Target("cuda_mfu", "1.5B parameters on CUDA, MFU", 0.50, is_goal=True, unit="%"),
)
CURVES = {"group_size": "trajectories a group", "sampled_length": "sampled tokens"}


def show(figures: Figures, console: Console) -> None:
    """What trainer.json holds, in one screen."""
    details = figures["details"]
    console.print(f"\nOn {in_words(figures['machine'])}\n", highlight=False)
    targets = new_table("Trainer", "target", "figure", "")
    for target in TARGETS:
        targets.add_row(*target.row(figures[target.key]))
    console.print(targets)
    if isinstance(details["cuda"], str):
        console.print(f"CUDA {details['cuda']}.", style="dim", highlight=False)
    _show_iteration(details["iteration"], details["floor"], console)
    _show_packing(details["packing"], console)
    _show_growth(figures["scaling"], console)


def in_words(machine: dict[str, Any]) -> str:
    threads = machine["num_threads"]
    return f"{machine['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, torch {machine['torch']}."


def _show_iteration(iteration: Figures, arithmetic: Figures, console: Console) -> None:
    console.print(
        f"\nAn iteration of the demo takes {arithmetic['iteration_seconds']:.2f} s and needs "
        f"{arithmetic['operations'] / 1e9:.0f} billion operations; this machine does "
        f"{arithmetic['matrix_rate'] / 1e9:.0f} a second in matrix products. Rollouts are "
        f"{iteration['rollout_share']:.0%} of it, at {arithmetic['rollout_floor_share']:.0%} of their floor; the "
        f"update is at {arithmetic['update_floor_share']:.0%} of its own.\n",
        highlight=False,
    )


def _show_packing(packed: Figures, console: Console) -> None:
    name = f"{packed['prompt']:,} + {packed['group_size']} × {packed['sampled']} tokens"
    table = new_table(name, "seconds", "the tree is", "peak memory", "the tree's")
    tree = packed["variants"][TREE]
    for label, variant in packed["variants"].items():
        seconds, memory = variant["seconds"], variant["step_mb"]
        is_other = label != TREE
        table.add_row(
            label,
            f"{seconds:.1f}",
            f"{seconds / tree['seconds']:.2f}× faster" if is_other else "",
            f"{memory / 1024:.2f} GB",
            f"{tree['step_mb'] / memory:.2f}×" if is_other else "",
        )
    console.print(table)
    console.print()


def _show_growth(scaling: Figures, console: Console) -> None:
    table = new_table("Slope of log seconds", *PARTS, "last doubling")
    for key, label in CURVES.items():
        curve = scaling[key]
        slopes = [f"{curve['slope'][part]:.2f}" for part in PARTS]
        sizes = f"{label}, {curve['sizes'][0]} to {curve['sizes'][-1]}"
        table.add_row(sizes, *slopes, f"{curve['slope_of_last_doubling']['iteration']:.2f}")
    console.print(table)


def new_table(name: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(f"[bold]{name}[/bold]", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    return table
