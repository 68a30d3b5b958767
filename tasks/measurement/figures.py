"""The progress chart: how success on held-out problems grew with training, and where the chosen snapshot stands.

One picture answers three questions: did training help (the curve, against dashed base, warm start and, where one was
measured, a frontier model), how sure is that (the band), and what did the chosen snapshot do on problems nothing had
touched (the diamond). Drawn with matplotlib's object interface: pyplot would open a window system and costs most of a
second. Left out for now: SVG, and the panels below (length, KL, share of groups with signal).
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.measurement.results import (
    POLICIES,
    StoredResults,
    interval,
    iteration_of,
    percent,
    read_results,
    read_training,
    short_name,
)
from tasks.settings import Paths
from tasks.storage import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Style:
    """Colours and size of one rendering; the report shows the one that fits the reader's screen."""

    width: float = 9.0  # inches
    height: float = 5.0
    paper: str = "#ffffff"
    ink: str = "#1c2030"
    muted: str = "#6a7182"
    grid: str = "#e9ebf0"
    base: str = "#7d8596"
    warm_start: str = "#a86400"
    curve: str = "#2b59d9"
    best: str = "#0b7a53"
    frontier: str = "#7c3aa8"

    @property
    def is_wide(self) -> bool:
        return self.width > 6


LIGHT = Style()
DARK = Style(
    paper="#14171f", ink="#e8eaf0", muted="#98a0b3", grid="#272c38", base="#98a0b3", warm_start="#e0a030",
    curve="#7d9dff", best="#3ecf97", frontier="#c792ea",
)  # fmt: skip
# For a phone: narrow, so that the words stay legible when the picture is as wide as the screen.
LIGHT_NARROW, DARK_NARROW = replace(LIGHT, width=4.6, height=4.6), replace(DARK, width=4.6, height=4.6)
MAX_LABEL_CHARACTERS = 28
FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


def progress_chart(paths: Paths, out: Path, *, style: Style = LIGHT) -> Path:
    """Draw the chart of the run under `paths` as a PNG at `out`; ValueError where evaluation has not run."""
    results, training = read_results(paths), read_training(paths)
    keep_matplotlib_inside(paths)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.family": font(), "font.size": 10}):
        figure = Figure(figsize=(style.width, style.height), dpi=200, facecolor=style.paper)
        axes = _axes(figure, style)
        _draw_training(axes, training, style)
        _draw_snapshots(axes, results, style)
        _draw_levels(axes, results, style)
        _draw_words(figure, axes, results, style)
        with atomic_file(out) as temporary:
            figure.savefig(temporary, format="png", facecolor=style.paper)
    return out


def keep_matplotlib_inside(paths: Paths) -> None:
    """Matplotlib writes a font list when imported: into the run's folder, since nothing may be left outside it."""
    os.environ.setdefault("MPLCONFIGDIR", str((paths.artifacts / ".cache" / "matplotlib").absolute()))


def font() -> str:
    """The first of FONTS this machine has; matplotlib itself brings the last."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return next(name for name in FONTS if name in installed)


def _axes(figure: Figure, style: Style) -> Axes:
    """One panel with margins in inches: title above, labels of the levels to the right."""
    left, right, bottom, top = 0.68, 1.72, 0.62, 1.2 if style.is_wide else 1.52
    axes = figure.add_axes(
        (
            left / style.width,
            bottom / style.height,
            1 - (left + right) / style.width,
            1 - (bottom + top) / style.height,
        )
    )
    axes.set_facecolor(style.paper)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0%", "20", "40", "60", "80", "100%"])
    axes.grid(axis="y", color=style.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6, colors=style.muted, labelsize=9.5)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("iteration", color=style.muted, fontsize=10, labelpad=7)
    return axes


def _draw_training(axes: Axes, training: list[dict[str, Any]], style: Style) -> None:
    if not training:
        return
    iterations = [row["iteration"] for row in training]
    rates = [row["success_rate"] for row in training]
    axes.plot(iterations, rates, color=style.curve, alpha=0.28, linewidth=1.0, label="training batches", zorder=2)


def _draw_snapshots(axes: Axes, results: StoredResults, style: Style) -> None:
    """Success on `select`: a line with its interval as a band, and as whiskers where one snapshot makes no band."""
    from matplotlib.ticker import MaxNLocator

    points = sorted((iteration_of(name), result) for name, result in results.evaluation["select"].items())
    iterations = [iteration for iteration, _ in points]
    rates = [result["success_rate"] for _, result in points]
    low, high = ([result[end] for _, result in points] for end in ("ci_low", "ci_high"))
    axes.fill_between(iterations, low, high, color=style.curve, alpha=0.16, linewidth=0, zorder=3)
    if len(points) == 1:
        axes.vlines(iterations, low, high, color=style.curve, linewidth=1.4, zorder=3)
    axes.plot(
        iterations, rates, color=style.curve, linewidth=2.2, marker="o", markersize=6, markeredgecolor=style.paper,
        markeredgewidth=1.3, label=f"snapshots on select, with {results.interval_name}", clip_on=False,
        zorder=5,
    )  # fmt: skip
    room_for_diamond = 0.35 / (axes.get_position().width * style.width)
    axes.set_xlim(0, max(iterations) * (1 + room_for_diamond))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9 if style.is_wide else 5, steps=[1, 2, 5, 10], integer=True))


def _draw_levels(axes: Axes, results: StoredResults, style: Style) -> None:
    """The results on `test`: whiskers at the right edge with names, dashed levels for base and warm start, and for the
    model behind an endpoint where one was measured.

    The best snapshot's level is thin and starts at the ringed point it was chosen by, so that the step from select to
    test is seen and not hidden under one marker.
    """
    best_iteration, edge = iteration_of(results.best_snapshot), axes.get_xlim()[1]
    chosen = results.evaluation["select"][results.best_snapshot]["success_rate"]
    colors = {"base": style.base, "warm_start": style.warm_start, "best": style.best, "frontier": style.frontier}
    names, levels = {**POLICIES, "frontier": "frontier"}, results.test
    if results.frontier is not None:
        levels["frontier"] = results.frontier["result"]
        _name_frontier(axes, results.frontier, style)
    for policy, result in levels.items():
        rate, color = result["success_rate"], colors[policy]
        if policy == "best":
            axes.plot([best_iteration, edge], [rate, rate], color=color, linewidth=1.2, dashes=(1, 1.5), zorder=4)
            axes.plot(
                [best_iteration], [chosen], color=color, marker="o", markersize=12, markerfacecolor="none",
                markeredgewidth=1.8, linestyle="none", clip_on=False, zorder=6,
            )  # fmt: skip
        else:
            axes.axhline(rate, color=color, linewidth=1.4, dashes=(5, 3), zorder=4)
        axes.vlines(edge, result["ci_low"], result["ci_high"], color=color, linewidth=1.8, clip_on=False, zorder=7)
        axes.plot(
            [edge], [rate], color=color, marker="D", markersize=9 if policy == "best" else 6, markeredgewidth=0,
            clip_on=False, linestyle="none", zorder=8,
        )  # fmt: skip
    heights = spread([result["success_rate"] for result in levels.values()], gap=0.115)
    for (policy, result), height in zip(levels.items(), heights, strict=True):
        _name_level(axes, height, names[policy], result, colors[policy], style)


def _name_frontier(axes: Axes, frontier: dict[str, Any], style: Style) -> None:
    """The model's name on its line, at the left, where a curve that starts low leaves room."""
    rate = frontier["result"]["success_rate"]
    below = rate > 0.5
    axes.annotate(
        short_name(frontier["model"], MAX_LABEL_CHARACTERS), (0, rate), (4, -4 if below else 4),
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", color=style.frontier, fontsize=8.5,
        va="top" if below else "bottom", zorder=9, parse_math=False,
        bbox={"facecolor": style.paper, "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
    )  # fmt: skip


def _name_level(axes: Axes, height: float, name: str, result: dict[str, Any], color: str, style: Style) -> None:
    where: dict[str, Any] = {
        "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False,
    }  # fmt: skip
    words = f"{percent(result['success_rate'])} {name}"
    axes.annotate(words, (1, height), (13, 1), color=color, fontweight="bold", fontsize=10, va="bottom", **where)
    words = f"{interval(result)} on test"
    axes.annotate(words, (1, height), (13, -2), color=style.muted, fontsize=8.5, va="top", **where)


def _draw_words(figure: Figure, axes: Axes, results: StoredResults, style: Style) -> None:
    """Title, one sentence on what is shown, legend; all flush left, in inches from the top."""
    test = results.test["best"]
    left, inch = 0.26 / style.width, 1 / style.height
    samples = test["samples_per_problem"]
    sentence = (
        f"{results.best_snapshot} was chosen on select, then met {test['num_problems']} test problems, "
        f"{samples} {'episode' if samples == 1 else 'episodes'} each."
    )
    figure.text(
        left, 1 - 0.22 * inch, "Success on held-out problems", color=style.ink, fontsize=15, fontweight="bold", va="top"
    )
    figure.text(
        left, 1 - 0.55 * inch, textwrap.fill(sentence, int(style.width * 11)), color=style.muted, fontsize=10, va="top",
        linespacing=1.35,
    )  # fmt: skip
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="lower left", bbox_to_anchor=(left, axes.get_position().y1 + 0.08 * inch),
        ncols=2 if style.is_wide else 1, frameon=False, fontsize=9, labelcolor=style.muted, handlelength=2.2,
        columnspacing=1.8, borderpad=0, borderaxespad=0,
    )  # fmt: skip


def spread(heights: list[float], *, gap: float) -> list[float]:
    """The heights, moved upwards as little as keeps each at least `gap` above the one below; order is kept."""
    placed: dict[int, float] = {}
    lowest = float("-inf")
    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        lowest = placed[index] = max(heights[index], lowest + gap)
    return [placed[index] for index in range(len(heights))]
