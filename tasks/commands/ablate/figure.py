"""The ablation in one picture: success and length while each variant trained, and what its last snapshot can do."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.ablate.table import WARM_START, caveats, num_untrained, points, stopped, what_was_compared
from tasks.commands.ablate.variants import BASE
from tasks.core.settings import Paths
from tasks.measurement.points import level_text
from tasks.report.drawing import (
    LIGHT,
    LINE,
    LINES,
    MARGIN,
    SMALL,
    TEXT,
    TINY,
    Style,
    apart,
    draw_heading,
    drawing,
    empty_panel,
    new_figure,
    save_png,
    write,
)
from tasks.report.results import interval, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = list[float]
Rows = list[dict[str, Any]]  # training metrics of one run, one row per iteration
SMOOTHED_SHARE = 10  # a curve is the mean over a tenth of the planned iterations
# Inches.
WIDTH, LEFT, NAMES, GUTTER = 11.5, 0.72, 1.72, 0.62
TOP, CURVES, BETWEEN, ROW, BOTTOM, NOTE = 1.9, 3.1, 1.35, 0.34, 0.65, 0.17
COLUMNS = (20, 66, 140)  # of numbers beside the last panel, in points from its edge


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    color: str
    is_base: bool
    curves: list[Curve]
    stopped: str


def ablation_figure(results: dict[str, Any], training: dict[str, list[Rows]], paths: Paths, out: Path) -> Path:
    """Draw results.json and the training rows of each variant, one list per seed, as a PNG at `out`."""
    num_rows = len(results["variants"])
    notes = [part for line in caveats(results) for part in textwrap.wrap(line, int(WIDTH * 14))]
    words = [part for line in what_was_compared(results)[:1] for part in textwrap.wrap(line, int(WIDTH * 12.4))]
    above = TOP + LINE * max(0, len(words) - 4)
    height = above + CURVES + BETWEEN + ROW * num_rows + BOTTOM + NOTE * len(notes)
    colors = _colors(results, LIGHT)
    with drawing(paths):
        figure = new_figure(WIDTH, height, LIGHT)
        draw_heading(figure, "What each choice changes in training", words, LIGHT)
        look: dict[str, Any] = {"color": LIGHT.muted, "fontsize": TINY, "linespacing": 1.35, "va": "bottom"}
        figure.text(MARGIN / WIDTH, 0.18 / height, "\n".join(notes), **look)
        panel = (WIDTH - LEFT - GUTTER - 2 * NAMES) / 2
        for number, key in enumerate(("success_rate", "mean_sampled_tokens")):
            left = LEFT + number * (panel + NAMES + GUTTER)
            axes = empty_panel(figure, left, above, panel, CURVES, LIGHT, grid="y")
            _draw_curves(axes, key, results, _lines(results, training, key, colors), LIGHT)
        top, width = above + CURVES + BETWEEN, WIDTH - LEFT - 3.6 * NAMES
        final = empty_panel(figure, LEFT + NAMES, top, width, ROW * num_rows, LIGHT, grid="x")
        _draw_final(final, results, colors, LIGHT)
        save_png(figure, out)
    return out


def smoothed(values: Sequence[float | None], window: int) -> Curve:
    """The mean of each value and those before it, `window` in all; fewer at the start, and where an iteration has none
    (it lost its episodes). A window without any repeats the mean before it; NaN, a gap, until there is one.
    """
    found: list[float] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if value is not None]
        found.append(math.fsum(known) / len(known) if known else [math.nan, *found][-1])
    return found


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds while all of them run: once one is stopped, the others look better than they are. NaN where
    none has a value yet.
    """
    means = []
    for values in zip(*curves, strict=False):
        known = [value for value in values if not math.isnan(value)]
        means.append(math.fsum(known) / len(known) if known else math.nan)
    return means


def _colors(results: dict[str, Any], style: Style) -> dict[str, str]:
    others = [variant["name"] for variant in results["variants"] if variant["name"] != BASE]
    return {BASE: style.ink, **{name: LINES[number % len(LINES)] for number, name in enumerate(others)}}


def _lines(results: dict[str, Any], training: dict[str, list[Rows]], key: str, colors: dict[str, str]) -> list[Line]:
    window = _window(results)
    lines = [
        Line(
            name=variant["name"],
            color=colors[variant["name"]],
            is_base=variant["name"] == BASE,
            curves=[
                smoothed([row.get(key) for row in rows], window)
                for rows in training[variant["name"]]
                if any(row.get(key) is not None for row in rows)
            ],
            stopped=stopped(variant),
        )
        for variant in results["variants"]
    ]
    return sorted((line for line in lines if line.curves), key=lambda line: line.is_base)


def _window(results: dict[str, Any]) -> int:
    return max(1, results["num_iterations"] // SMOOTHED_SHARE)


def _title(axes: Axes, words: str, detail: str, style: Style, *, left: float = 0.0) -> None:
    """A bold title above a panel with a detail beneath; `left` in points from the panel's edge."""
    write(axes, words, (0, 1), (left, 31), color=style.ink, size=TEXT, fontweight="bold", va="bottom")
    write(axes, detail, (0, 1), (left, 17), color=style.muted, size=SMALL, va="bottom")


def _draw_curves(axes: Axes, key: str, results: dict[str, Any], lines: list[Line], style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    window = _window(results)
    detail = "each iteration" if window == 1 else f"mean of the last {window} iterations"
    for line in lines:
        for curve in line.curves if len(line.curves) > 1 else []:
            axes.plot(range(1, len(curve) + 1), curve, color=line.color, alpha=0.3, linewidth=0.8, zorder=2)
        mean = mean_curve(line.curves)
        width = 2.4 if line.is_base else 1.6
        axes.plot(range(1, len(mean) + 1), mean, color=line.color, linewidth=width, zorder=4)
    axes.set_xlim(0, max(results["num_iterations"], 2))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("iteration", color=style.muted, fontsize=TEXT, labelpad=7)
    values = [value for line in lines for curve in line.curves for value in curve if not math.isnan(value)] or [0.0]
    if key == "success_rate":
        _title(axes, "Success in training batches", detail, style)
        _rates(axes, "y", min(values))
    else:
        _title(axes, "Sampled tokens per episode", detail, style)
        axes.set_ylim(0, 1.12 * max(*values, 1.0))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    _name_lines(axes, lines, style)


def _rates(axes: Axes, axis: str, lowest: float) -> None:
    """A percent axis from the ten below `lowest` to 100; only its ends have the sign."""
    start = max(0, math.floor(10 * lowest - 0.2)) * 10
    step = 20 if start < 50 else 10
    ticks = list(range(100, start - 1, -step))[::-1]
    labels = [f"{tick}%" if tick in (ticks[0], 100) else str(tick) for tick in ticks]
    margin = 0.02 * (100 - start) / 100
    limits = {f"{axis}lim": (start / 100 - margin, 1 + margin)}
    axes.set(**limits)
    (axes.yaxis if axis == "y" else axes.xaxis).set_ticks([tick / 100 for tick in ticks], labels)


def _name_lines(axes: Axes, lines: list[Line], style: Style) -> None:
    """Each line's name in its colour, right of the panel and joined to its end; a cross where it was stopped."""
    from matplotlib.patheffects import withStroke

    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    ends = [(len(mean), mean[-1]) for mean in (mean_curve(line.curves) for line in lines)]
    heights = apart([(value - low) / (high - low) for _, value in ends], gap=0.21 / CURVES)
    words: dict[str, Any] = {"coords": "data", "size": SMALL}
    for line, (iteration, value), height in zip(lines, ends, heights, strict=True):
        joint, beside = 1.045 * edge, low + height * (high - low)
        end: dict[str, Any] = {"color": line.color, "markeredgecolor": style.paper, "clip_on": False, "zorder": 6}
        thin: dict[str, Any] = {"color": line.color, "alpha": 0.6, "linewidth": 0.8, "clip_on": False}
        if line.stopped == "–":
            axes.plot([iteration], [value], "o", markersize=5, **end)
            axes.plot([iteration, joint], [value, beside], **thin)
        else:
            axes.plot([iteration], [value], "X", markersize=9, **end)
            axes.plot([iteration, edge, joint], [value, value, beside], dashes=(1, 2), **thin)
            halo = [withStroke(linewidth=3, foreground=style.paper)]
            write(axes, f"stopped {line.stopped}", (iteration, value), (7, 5), color=line.color, zorder=7,
                  path_effects=halo, **words)  # fmt: skip
        weight = "bold" if line.is_base else "normal"
        write(axes, line.name, (joint, beside), (4, 0), color=line.color, fontweight=weight, va="center", **words)


def _draw_final(axes: Axes, results: dict[str, Any], colors: dict[str, str], style: Style) -> None:
    """One row per variant: a point with its interval, a tick per seed, and the numbers to the right."""
    variants, name = results["variants"], f"{level_text(results['confidence'])} interval"
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_yticks([])
    _rates(axes, "x", min(item["ci_low"] for variant in variants for item in (variant["result"], *variant["runs"])))
    title = f"Success of the last snapshot on {variants[0]['result']['num_problems']} problems of {results['split']}"
    ticks = "; the ticks are its seeds" if any(len(variant["runs"]) > 1 for variant in variants) else ""
    detail = f"with {name}{ticks}; differences to base in percentage points, paired by problem"
    _title(axes, title, detail, style, left=-72 * NAMES)
    for words, offset in zip(("success", name, "against base"), COLUMNS, strict=True):
        write(axes, words, (1, 1), (offset, 4), color=style.muted, size=TINY, va="bottom")
    for row, variant in enumerate(variants):
        result, color = variant["result"], colors[variant["name"]]
        axes.hlines(row, result["ci_low"], result["ci_high"], color=color, linewidth=2.0, zorder=4, clip_on=False)
        axes.plot([result["success_rate"]], [row], "o", color=color, markersize=7.5, zorder=6, clip_on=False)
        if len(variant["runs"]) > 1:
            rates = [run["success_rate"] for run in variant["runs"]]
            axes.plot(rates, [row + 0.27] * len(rates), "|", color=color, markersize=4, clip_on=False, zorder=5)
        _row_words(axes, row, variant, color, style)
    if variants[0]["name"] == BASE:
        axes.axvline(variants[0]["result"]["success_rate"], color=style.ink, linewidth=0.9, dashes=(5, 3), zorder=3)


def _row_words(axes: Axes, row: int, variant: dict[str, Any], color: str, style: Style) -> None:
    where: dict[str, Any] = {"coords": "data", "va": "center", "size": SMALL}
    left, right = axes.get_xlim()
    weight = "bold" if variant["name"] == BASE else "normal"
    write(axes, variant["name"], (left, row), (-72 * NAMES, 0), color=color, fontweight=weight, **where)
    rate, ends = percent(variant["result"]["success_rate"]), interval(variant["result"])
    write(axes, rate, (right, row), (COLUMNS[0], 0), color=color, fontweight="bold", **where)
    write(axes, ends, (right, row), (COLUMNS[1], 0), color=style.muted, **where)
    if variant["difference"] is not None:
        write(axes, points(variant["difference"]), (right, row), (COLUMNS[2], 0), color=style.muted, **where)
    elif num_untrained(variant) == len(variant["runs"]):
        write(axes, WARM_START, (right, row), (COLUMNS[2], 0), color=style.muted, **where)
