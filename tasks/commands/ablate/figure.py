"""The ablation in one picture: success and length while each variant trained, and what its last snapshot can do.

Collapse has an order: completions grow, then success falls. So the two curves stand side by side over the same
iterations, and below them is the number that counts, success on held-out problems with its interval. Every line is
named where it ends; a dashed one lets overlong episodes into the loss. With several seeds the thin lines are the seeds.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.ablate.results import BASE
from tasks.commands.ablate.words import caveats, points, stopped, what_was_compared
from tasks.core.settings import Paths
from tasks.report.drawing import LIGHT, Style, apart, drawing, empty_panel, save_png
from tasks.report.results import interval, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[float]
Rows = list[dict[str, Any]]  # training metrics of one run, one row an iteration
# Colour by what is changed; a variant that is not named here is drawn muted.
COLORS = {
    BASE: "#1c2030",
    "kl_0": "#d0342c",
    "kl_0.04": "#d98200",
    "fixed_reference": "#2b59d9",
    "shaped_reward": "#8a3fb5",
    "overlong_kept": "#0b7a53",
    "kl_0_overlong_kept": "#d0342c",
}
DASHED = ("overlong_kept", "kl_0_overlong_kept")
SMOOTHED_SHARE = 10  # a curve is the mean over a tenth of the planned iterations
# Inches.
WIDTH, LEFT, NAMES, GUTTER = 11.5, 0.72, 1.72, 0.62
TOP, CURVES, BETWEEN, ROW, BOTTOM, NOTE = 1.9, 3.1, 1.35, 0.34, 0.65, 0.17
COLUMNS = (20, 66, 140)  # of numbers beside the last panel, in points from its edge


@dataclass(frozen=True, slots=True)
class Line:
    """One variant as it is drawn: its name, colour and dash, and a curve a seed."""

    label: str
    color: str
    is_dashed: bool
    is_base: bool
    curves: list[Curve]
    stopped: str


def ablation_figure(
    results: dict[str, Any], training: dict[str, list[Rows]], paths: Paths, out: Path, *, style: Style = LIGHT
) -> Path:
    """Draw results.json and the training rows of each variant, one list a seed, as a PNG at `out`."""
    num_rows = len(results["variants"])
    notes = [part for line in caveats(results) for part in textwrap.wrap(line, int(WIDTH * 14))]
    height = TOP + CURVES + BETWEEN + ROW * num_rows + BOTTOM + NOTE * len(notes)
    style = replace(style, width=WIDTH, height=height)
    with drawing(paths):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.width, style.height), dpi=200, facecolor=style.paper)
        _draw_words(figure, results, notes, style)
        panel = (WIDTH - LEFT - GUTTER - 2 * NAMES) / 2
        for number, key in enumerate(("success_rate", "mean_sampled_tokens")):
            axes = empty_panel(figure, LEFT + number * (panel + NAMES + GUTTER), TOP, panel, CURVES, style)
            _draw_curves(axes, key, results, _lines(results, training, key, style), style)
        top, width = TOP + CURVES + BETWEEN, WIDTH - LEFT - 3.6 * NAMES
        final = empty_panel(figure, LEFT + NAMES, top, width, ROW * num_rows, style)
        _draw_final(final, results, style)
        save_png(figure, out)
    return out


def smoothed(values: Curve, window: int) -> Curve:
    """The mean of each value and those before it, `window` together; fewer at the start, where there are no more."""
    return [math.fsum(values[max(0, end - window) : end]) / min(window, end) for end in range(1, len(values) + 1)]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds while all of them run: once one is stopped, the others are a flattering sample."""
    return [math.fsum(values) / len(values) for values in zip(*curves, strict=False)]


def _lines(results: dict[str, Any], training: dict[str, list[Rows]], key: str, style: Style) -> list[Line]:
    """Every variant that has training rows, the base last so that it lies on top."""
    window = _window(results)
    lines = [
        Line(
            label=variant["label"],
            color=_color(variant["name"], style),
            is_dashed=variant["name"] in DASHED,
            is_base=variant["name"] == BASE,
            curves=[smoothed([row[key] for row in rows], window) for rows in training[variant["name"]] if rows],
            stopped=stopped(variant),
        )
        for variant in results["variants"]
    ]
    return sorted((line for line in lines if line.curves), key=lambda line: line.is_base)


def _window(results: dict[str, Any]) -> int:
    return max(1, results["num_iterations"] // SMOOTHED_SHARE)


def _color(name: str, style: Style) -> str:
    return style.ink if name == BASE else COLORS.get(name, style.muted)


def _title(axes: Axes, words: str, detail: str, style: Style, *, left: float = 0.0) -> None:
    """A bold title above a panel with what it shows beneath; `left` in points from the panel's edge."""
    where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(words, (0, 1), (left, 31), color=style.ink, fontweight="bold", fontsize=11, va="bottom", **where)
    axes.annotate(detail, (0, 1), (left, 17), color=style.muted, fontsize=9, va="bottom", **where)


def _draw_curves(axes: Axes, key: str, results: dict[str, Any], lines: list[Line], style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    window = _window(results)
    detail = "each iteration" if window == 1 else f"mean of the last {window} iterations"
    axes.grid(axis="y", color=style.grid, linewidth=0.9)
    for line in lines:
        look: dict[str, Any] = {"color": line.color, "dashes": (4, 1.6) if line.is_dashed else (None, None)}
        for curve in line.curves if len(line.curves) > 1 else []:
            axes.plot(range(1, len(curve) + 1), curve, alpha=0.3, linewidth=0.8, zorder=2, **look)
        mean = mean_curve(line.curves)
        axes.plot(range(1, len(mean) + 1), mean, linewidth=2.4 if line.is_base else 1.6, zorder=4, **look)
    axes.set_xlim(0, max(results["num_iterations"], 2))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("iteration", color=style.muted, fontsize=10, labelpad=7)
    values = [value for line in lines for curve in line.curves for value in curve] or [0.0]
    if key == "success_rate":
        _title(axes, "Success in training batches", detail, style)
        _rates(axes, "y", min(values))
    else:
        _title(axes, "Sampled tokens an episode", detail, style)
        axes.set_ylim(0, 1.12 * max(*values, 1.0))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    _name_lines(axes, lines, style)


def _rates(axes: Axes, axis: str, lowest: float) -> None:
    """An axis of percent from the ten below `lowest` to 100; the sign is at its ends only."""
    start = max(0, math.floor(10 * lowest - 0.2)) * 10
    step = 20 if start < 50 else 10
    ticks = list(range(100, start - 1, -step))[::-1]
    labels = [f"{tick}%" if tick in (ticks[0], 100) else str(tick) for tick in ticks]
    margin = 0.02 * (100 - start) / 100
    if axis == "y":
        axes.set_ylim(start / 100 - margin, 1 + margin)
        axes.set_yticks([tick / 100 for tick in ticks], labels)
    else:
        axes.set_xlim(start / 100 - margin, 1 + margin)
        axes.set_xticks([tick / 100 for tick in ticks], labels)


def _name_lines(axes: Axes, lines: list[Line], style: Style) -> None:
    """Each line's name in its colour, right of the panel and joined to its end; a cross where it was stopped."""
    from matplotlib.patheffects import withStroke

    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    ends = [(len(mean), mean[-1]) for line in lines if (mean := mean_curve(line.curves))]
    heights = apart([(value - low) / (high - low) for _, value in ends], gap=0.21 / CURVES, low=0.0, high=1.0)
    words: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 9}
    for line, (iteration, value), height in zip(lines, ends, heights, strict=True):
        joint, beside = 1.045 * edge, low + height * (high - low)
        end: dict[str, Any] = {"color": line.color, "markeredgecolor": style.paper, "clip_on": False, "zorder": 6}
        if line.stopped == "–":
            axes.plot([iteration], [value], "o", markersize=5, **end)
            axes.plot([iteration, joint], [value, beside], color=line.color, alpha=0.6, linewidth=0.8, clip_on=False)
        else:
            axes.plot([iteration], [value], "X", markersize=9, **end)
            axes.plot([iteration, edge, joint], [value, value, beside], color=line.color, alpha=0.6, linewidth=0.8,
                      dashes=(1, 2), clip_on=False)  # fmt: skip
            axes.annotate(f"stopped {line.stopped}", (iteration, value), (7, 5), color=line.color, zorder=7,
                          path_effects=[withStroke(linewidth=3, foreground=style.paper)], **words)  # fmt: skip
        weight = "bold" if line.is_base else "normal"
        axes.annotate(line.label, (joint, beside), (4, 0), color=line.color, fontweight=weight, va="center", **words)


def _draw_final(axes: Axes, results: dict[str, Any], style: Style) -> None:
    """One row a variant: a point with its interval, a tick a seed, and the numbers to the right."""
    variants = results["variants"]
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_yticks([])
    _rates(axes, "x", min(item["ci_low"] for variant in variants for item in (variant["result"], *variant["runs"])))
    axes.grid(axis="x", color=style.grid, linewidth=0.9)
    title = f"Success of the last snapshot on {variants[0]['result']['num_problems']} problems of {results['split']}"
    ticks = "; the ticks are its seeds" if any(len(variant["runs"]) > 1 for variant in variants) else ""
    detail = f"with {results['confidence']:.0%} interval{ticks}; differences to base in points, paired by problem"
    _title(axes, title, detail, style, left=-72 * NAMES)
    _column_heads(axes, f"{results['confidence']:.0%} interval", style)
    for row, variant in enumerate(variants):
        result, color = variant["result"], _color(variant["name"], style)
        axes.hlines(row, result["ci_low"], result["ci_high"], color=color, linewidth=2.0, zorder=4, clip_on=False)
        is_hollow = variant["name"] in DASHED
        axes.plot([result["success_rate"]], [row], "o", color=color, markersize=7.5, zorder=6, clip_on=False,
                  markerfacecolor=style.paper if is_hollow else color, markeredgewidth=1.8)  # fmt: skip
        if len(variant["runs"]) > 1:
            rates = [run["success_rate"] for run in variant["runs"]]
            axes.plot(rates, [row + 0.27] * len(rates), "|", color=color, markersize=4, clip_on=False, zorder=5)
        _row_words(axes, row, variant, color, style)
    if variants[0]["name"] == BASE:
        axes.axvline(variants[0]["result"]["success_rate"], color=style.ink, linewidth=0.9, dashes=(5, 3), zorder=3)


def _column_heads(axes: Axes, interval_name: str, style: Style) -> None:
    for words, offset in (("success", COLUMNS[0]), (interval_name, COLUMNS[1]), ("against base", COLUMNS[2])):
        axes.annotate(
            words, (1, 1), (offset, 4), xycoords="axes fraction", textcoords="offset points", annotation_clip=False,
            color=style.muted, fontsize=8.5, va="bottom",
        )  # fmt: skip


def _row_words(axes: Axes, row: int, variant: dict[str, Any], color: str, style: Style) -> None:
    where: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "va": "center", "fontsize": 9.5}
    left, right = axes.get_xlim()
    weight = "bold" if variant["name"] == BASE else "normal"
    axes.annotate(variant["label"], (left, row), (-72 * NAMES, 0), color=color, fontweight=weight, **where)
    rate, ends = percent(variant["result"]["success_rate"]), interval(variant["result"])
    axes.annotate(rate, (right, row), (COLUMNS[0], 0), color=color, fontweight="bold", **where)
    axes.annotate(ends, (right, row), (COLUMNS[1], 0), color=style.muted, **where)
    if variant["difference"] is not None:
        axes.annotate(points(variant["difference"]), (right, row), (COLUMNS[2], 0), color=style.muted, **where)


def _draw_words(figure: Figure, results: dict[str, Any], notes: list[str], style: Style) -> None:
    """Title and what was compared above, what the intervals do not say below; flush left."""
    left, inch = 0.26 / style.width, 1 / style.height
    title = "What each choice changes in training"
    figure.text(left, 1 - 0.26 * inch, title, color=style.ink, fontsize=15, fontweight="bold", va="top")
    look: dict[str, Any] = {"color": style.muted, "linespacing": 1.35}
    text = textwrap.fill(what_was_compared(results), int(style.width * 12.4))
    figure.text(left, 1 - 0.6 * inch, text, fontsize=10, va="top", **look)
    figure.text(left, 0.18 * inch, "\n".join(notes), fontsize=8.5, va="bottom", **look)
