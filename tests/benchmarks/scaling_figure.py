"""The two cost curves side by side on logarithmic axes: rollout, update and whole iteration, each with its slope."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.settings import Paths
from tasks.report.drawing import (
    LIGHT,
    SMALL,
    Style,
    draw_heading,
    drawing,
    empty_panel,
    new_figure,
    save_png,
    spread,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("group_size", "trajectories per group", "{sampled} sampled tokens each"),
    ("sampled_length", "sampled tokens per trajectory", "groups of {group_size}"),
)
PARTS = (("iteration", LIGHT.ink), ("update", LIGHT.curve), ("rollout", LIGHT.warm_start))
# Inches.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, PANEL, NAMES = 10.5, 4.4, 0.72, 0.62, 1.12, 3.3, 1.75


def scaling_figure(scaling: dict[str, Any], machine: str, paths: Paths, out: Path, *, style: Style = LIGHT) -> Path:
    """Draw what `scaling.measure` returned as a PNG at `out`; `machine` says what it was measured on."""
    with drawing(paths):
        figure = new_figure(WIDTH, HEIGHT, style)
        what = f"Seconds, best of the rounds; both axes logarithmic. {scaling['problems']} problems, "
        what += f"{scaling['updates_per_batch']} updates per batch."
        draw_heading(figure, "What an iteration costs as it grows", [f"{what} {machine}"], style)
        limits = shared_limits(scaling)
        for number, (key, label, held) in enumerate(PANELS):
            left = LEFT + number * (PANEL + NAMES)
            axes = empty_panel(figure, left, TOP, PANEL, HEIGHT - BOTTOM - TOP, style, grid="y")
            axes.set_title(held.format(**scaling[key]), loc="left", color=style.muted, fontsize=SMALL, pad=8)
            draw(axes, scaling[key], label, limits, style)
        save_png(figure, out)
    return out


def shared_limits(scaling: dict[str, Any]) -> tuple[float, float]:
    """One scale of seconds for both panels."""
    seconds = [value for key, _, _ in PANELS for values in scaling[key]["seconds"].values() for value in values]
    return min(seconds) / 1.3, max(seconds) * 1.3


def draw(axes: Axes, curve: dict[str, Any], label: str, limits: tuple[float, float], style: Style) -> None:
    sizes = curve["sizes"]
    axes.set(xscale="log", yscale="log", ylim=limits, xlim=(sizes[0] / 1.15, sizes[-1] * 1.15))
    axes.set_xticks(sizes, [str(size) for size in sizes])
    ticks = [value for value in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0) if limits[0] <= value <= limits[1]]
    axes.set_yticks(ticks, [f"{value:g} s" for value in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label, color=style.muted, labelpad=7)
    low, high = map(math.log, limits)
    ends = [(math.log(curve["seconds"][part][-1]) - low) / (high - low) for part, _ in PARTS]
    heights = spread(ends, gap=0.075)
    for (part, color), height in zip(PARTS, heights, strict=True):
        axes.plot(sizes, curve["seconds"][part], color=color, linewidth=1.6, marker="o", markersize=3.5)
        name = f"{part}, slope {curve['slope'][part]:.2f}"
        write(axes, name, (1.03, height), (0, 0), color=color, size=SMALL, va="center")
