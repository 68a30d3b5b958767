"""The progress chart: how success on held-out problems grew with training, and where the chosen snapshot is.

The curve is success on `select`; dashed levels are other models on `test`; the large diamond is the chosen snapshot on
`test`; small panels show training (`chart_panels`). The x axis is optimizer steps (infra/decisions/0015).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import number_of
from tasks.core.settings import Paths
from tasks.core.text import counted
from tasks.report.chart_levels import NAMES, Level, draw_levels, levels_of, names_width
from tasks.report.chart_panels import Panel, batch_line, draw_panel, measured_panels, panel_name_width, window_of
from tasks.report.drawing import (
    LIGHT,
    LINE,
    MARGIN,
    SMALL,
    TEXT,
    Format,
    Style,
    draw_heading,
    drawing,
    empty_panel,
    new_figure,
    panel_size,
    save_png,
    save_svg,
    write,
)
from tasks.report.results import (
    StoredResults,
    interval,
    optimizer_steps,
    percent,
    read_results,
    short_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Rows = list[dict[str, Any]]  # training metrics, one row per iteration
TITLE = "Success on held-out problems"
MAX_LABEL_CHARACTERS = 28
# Inches.
LEFT, RIGHT, BOTTOM = 0.68, 0.16, 0.62
MAIN, HEADING, PANEL, BETWEEN = 3.1, 0.62, 0.5, 0.2  # heights


@dataclass(frozen=True, slots=True)
class Axis:
    """An iteration's place on the x axis: its optimizer steps, or its own number where those are not known."""

    steps: dict[int, int] | None

    def at(self, iteration: int) -> int:
        return iteration if self.steps is None else self.steps[iteration]

    @property
    def label(self) -> str:
        if self.steps is None:
            return "iteration"
        return f"optimizer steps ({max(self.steps.values())} in {max(self.steps)} iterations)"


def progress_chart(paths: Paths, out: Path, *, style: Style = LIGHT) -> Path:
    """Draw the chart of the run under `paths` at `out`: SVG or PNG, by its ending. ValueError without an evaluation."""
    results = read_results(paths)
    form: Format = "svg" if out.suffix == ".svg" else "png"
    with drawing(paths, form):
        figure = draw_progress(results, style)
        if form == "svg":
            save_svg(figure, out, title=TITLE, description=in_words(results))
        else:
            save_png(figure, out)
    return out


def draw_progress(results: StoredResults, style: Style) -> Figure:
    snapshots, training = results.evaluation["select"], results.training
    axis = Axis(optimizer_steps(training, snapshots))
    xs = [axis.at(row["iteration"]) for row in training]
    levels, panels, keys = levels_of(results, style), measured_panels(training), _keys(results, training, style)
    sentence = textwrap.wrap(_sentence(results, axis), int(style.width * 11))
    figure, main, below = _empty(style, levels, panels, num_lines=len(sentence), num_keys=len(keys))
    draw_heading(figure, TITLE, sentence, style)
    _draw_keys(figure, main, keys, style)
    main.set_ylim(-0.02, 1.02)
    main.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0%", "20", "40", "60", "80", "100%"])
    main.plot(xs, [row.get("success_rate", math.nan) for row in training], **batch_line(training, style))
    _draw_snapshots(main, results, axis, style)
    last = max([*xs, *(axis.at(number_of(name)) for name in snapshots)])
    draw_levels(main, levels, last, style)
    for axes, panel in zip(below, panels, strict=True):
        draw_panel(axes, panel, xs, training, style)
    _mark_iterations([main, *below], results, training, axis, style)
    _share_axis([main, *below], axis.label, last, window_of(training), style)
    return figure


def in_words(results: StoredResults) -> str:
    """What the chart shows, for a reader who cannot see it."""
    num_snapshots = len(results.evaluation["select"])
    chosen = results.evaluation["select"][results.best_snapshot]
    levels = [f"{level.name} {percent(level.rate)} ({interval(level.result)})" for level in levels_of(results, LIGHT)]
    frontier = f" The frontier model is {short_name(results.frontier['model'])}." if results.frontier else ""
    return (
        f"Of {counted(num_snapshots, 'snapshot')} {results.best_snapshot} was chosen, "
        f"with {percent(chosen['success_rate'])} on select. Success on test, with {results.interval_name}: "
        f"{', '.join(levels)}.{frontier}"
    )


def _sentence(results: StoredResults, axis: Axis) -> str:
    test = results.test["best"]
    where = "" if axis.steps is None else f" (optimizer step {axis.at(number_of(results.best_snapshot))})"
    samples = test["samples_per_problem"]
    each = f"{counted(samples, 'episode')} each"
    words = (
        f"{results.best_snapshot}{where} was chosen on select, then played "
        f"{counted(test['num_problems'], 'test problem')}, {each}."
    )
    if results.frontier is not None:
        words += f" Frontier: {short_name(results.frontier['model'], MAX_LABEL_CHARACTERS)}."
    if results.reflexion is not None:
        words += " After each try on test, these tries read the verdict; nothing else did."
    return words


def _keys(results: StoredResults, training: Rows, style: Style) -> list[Line2D]:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"marker": "o", "markersize": 6, "solid_capstyle": "butt"}
    tested = f"on test, {results.interval_name}"
    keys = [
        Line2D([], [], linewidth=2.2, color=style.curve, label=f"snapshots on select, {results.interval_name}", **dot),
        Line2D([], [], linestyle="", marker="D", markersize=6, markeredgewidth=0, color=style.muted, label=tested),
    ]
    if training:
        keys.append(Line2D([], [], color=style.muted, alpha=0.5, linewidth=0.9, label="training batches"))
    if results.dropped:
        label = "dropped early, on fewer problems"
        light: dict[str, Any] = {"color": style.light_curve, "markerfacecolor": style.paper, "markeredgewidth": 1.2}
        keys.append(Line2D([], [], linewidth=1.2, label=label, **light, **dot))
    if any("rolled_back_to" in row for row in training):
        keys.append(Line2D([], [], color=style.muted, linewidth=1.0, dashes=(1, 2), label="rolled back"))
    return keys


def _empty(
    style: Style, levels: Sequence[Level], panels: Sequence[Panel], *, num_lines: int, num_keys: int
) -> tuple[Figure, Axes, list[Axes]]:
    top = 0.56 + LINE * num_lines + 0.1 + LINE * math.ceil(num_keys / _num_columns(style)) + 0.14
    above = 0 if style.is_wide else LINE  # for the names of the panels
    first, step = top + MAIN + HEADING + above, PANEL + BETWEEN + above
    tops = [first + step * number for number in range(len(panels))]
    bottom = tops[-1] + PANEL if tops else top + MAIN
    names = max(names_width(levels, style), *(panel_name_width(panel, style) for panel in panels), 0.0)
    width = style.width - LEFT - NAMES - RIGHT - names
    figure = new_figure(style.width, bottom + BOTTOM, style)
    main = empty_panel(figure, LEFT, top, width, MAIN, style)
    return figure, main, [empty_panel(figure, LEFT, top, width, PANEL, style) for top in tops]


def _num_columns(style: Style) -> int:
    return 3 if style.is_wide else 1


def _draw_snapshots(axes: Axes, results: StoredResults, axis: Axis, style: Style) -> None:
    """Success on `select` with its interval; snapshots that racing dropped met fewer problems, so they are drawn
    lighter.
    """
    select = results.evaluation["select"]
    points = sorted((axis.at(number_of(name)), name) for name in select)
    size = min(6.0, max(2.5, 0.5 * 72 * panel_size(axes)[0] / len(points)))
    if results.dropped:
        _draw_run(axes, points, select, style, size, is_light=True)
    for is_dropped, run in groupby(points, key=lambda point: point[1] in results.dropped):
        if not is_dropped:
            _draw_run(axes, list(run), select, style, size)


def _draw_run(
    axes: Axes,
    points: Sequence[tuple[int, str]],
    select: dict[str, Any],
    style: Style,
    size: float,
    *,
    is_light: bool = False,
) -> None:
    xs = [x for x, _ in points]
    rates, low, high = ([select[name][key] for _, name in points] for key in ("success_rate", "ci_low", "ci_high"))
    color = style.light_curve if is_light else style.curve
    look: dict[str, Any] = {"markerfacecolor": style.paper} if is_light else {"markeredgecolor": style.paper}
    axes.fill_between(xs, low, high, color=style.curve, alpha=0.08 if is_light else 0.16, linewidth=0, zorder=3)
    if len(points) == 1:
        axes.vlines(xs, low, high, color=color, linewidth=1.4, zorder=3)
    axes.plot(
        xs, rates, color=color, linewidth=1.2 if is_light else 2.2, marker="o", markersize=size,
        markeredgewidth=0.2 * size, clip_on=False, zorder=4 if is_light else 5, **look,
    )  # fmt: skip


def _mark_iterations(panels: Sequence[Axes], results: StoredResults, training: Rows, axis: Axis, style: Style) -> None:
    """Ring the chosen snapshot in every panel, and mark where the sentinel rolled training back."""
    chosen = axis.at(number_of(results.best_snapshot))
    rate = results.evaluation["select"][results.best_snapshot]["success_rate"]
    main, *below = panels
    main.vlines(chosen, main.get_ylim()[0], rate, color=style.best, linewidth=1.0, linestyle=(0, (1, 2)), zorder=3)
    main.plot(
        [chosen], [rate], "o", color=style.best, markersize=12, markerfacecolor="none", markeredgewidth=1.8,
        clip_on=False, zorder=6,
    )  # fmt: skip
    for axes in below:
        axes.axvline(chosen, color=style.best, linewidth=1.0, dashes=(1, 2), zorder=3)
    for row in training:
        if "rolled_back_to" in row:
            for axes in panels:
                axes.axvline(axis.at(row["iteration"]), color=style.muted, linewidth=1.0, dashes=(1, 2), zorder=1)


def _share_axis(panels: Sequence[Axes], label: str, last: int, window: int, style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    main, *below = panels
    ticks = MaxNLocator(nbins=9 if style.is_wide else 4, steps=[1, 2, 5, 10], integer=True).tick_values(0, last)
    for axes in panels:
        axes.set_xticks([tick for tick in ticks if tick <= last])
        axes.set_xlim(main.get_xlim())
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel(label, color=style.muted, fontsize=TEXT if style.is_wide else SMALL, labelpad=7)
    if below:
        median = f", and the median of the last {window}" if window > 1 else ""
        words = f"Training: each iteration{median}"
        offset = 72 * (MARGIN - LEFT), 14 if style.is_wide else 26
        write(below[0], words, (0, 1), offset, color=style.muted, size=SMALL, va="bottom")


def _draw_keys(figure: Figure, main: Axes, keys: Sequence[Line2D], style: Style) -> None:
    place = MARGIN / style.width, main.get_position().y1 + 0.12 / figure.get_figheight()
    figure.legend(
        handles=keys, loc="lower left", bbox_to_anchor=place, ncols=_num_columns(style), frameon=False, fontsize=SMALL,
        labelcolor=style.muted, handlelength=2.2, columnspacing=1.6, borderpad=0, borderaxespad=0,
    )  # fmt: skip
