"""The small panels under the progress chart: how training went, on the same x axis.

A thin line is each iteration; a strong line is the median of the last tenth, since a mean would carry a spike along. A
spike that would flatten the rest is cut off at the panel's edge, with its number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.core.records import BY_ENVIRONMENT
from tasks.report.drawing import SMALL, TINY, Style, words_width, write
from tasks.report.results import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]  # training metrics, one row per iteration
WINDOW_SHARE = 10  # the strong line is the median over a tenth of the iterations
LONG_RUN = 250  # iterations
MAX_CUT_SHARE = 50  # at most one value in so many is cut off
# Shares of a panel's height: what a label of the scale takes, and what is thinner than a line.
LABEL, HAIR = 0.34, 0.02


@dataclass(frozen=True, slots=True)
class Panel:
    key: str
    name: str
    unit: str
    is_share: bool = False
    beside: str = ""  # the key of a second, dashed line; the panel is left out where the two are the same
    is_member: bool = False  # `key` is an environment of a mixture, which may be called as a metric is


PANELS = (
    Panel("mean_reward", "reward", "per episode; success dashed", beside="success_rate"),
    Panel("mean_sampled_tokens", "completion length", "tokens per episode"),
    Panel("entropy", "entropy", "nats per token"),
    Panel("kl", "KL from reference", "nats per token"),
    Panel("informative_group_share", "groups with signal", "share of each batch", is_share=True),
)


def measured_panels(training: Rows) -> list[Panel]:
    """Those with values, and one per environment of a mixture."""
    members = sorted({name for row in training for name in row.get(BY_ENVIRONMENT, ())})
    shown = [panel for panel in PANELS if any(_has_value(panel, row) for row in training)]
    return shown + [
        Panel(name, short_name(name), "success in training", is_share=True, is_member=True) for name in members
    ]


def value_of(row: dict[str, Any], panel: Panel) -> float:
    """NaN where it was not measured, such as an environment that an iteration did not draw."""
    found = (row.get(BY_ENVIRONMENT, {}) if panel.is_member else row).get(panel.key)
    return math.nan if found is None else float(found)


def _has_value(panel: Panel, row: dict[str, Any]) -> bool:
    value = row.get(panel.key)
    return value is not None and not (panel.beside and value == row.get(panel.beside))


def window_of(training: Rows) -> int:
    return max(1, len(training) // WINDOW_SHARE)


def rolling_median(values: Sequence[float], window: int) -> list[float]:
    """The median of each value and those before it, `window` in all; NaN (unknown) where less than half of them are
    known.
    """
    medians = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        medians.append(statistics.median(known) if 2 * len(known) >= window else math.nan)
    return medians


def highest_shown(values: Sequence[float]) -> float:
    """The panel's upper end: its highest value, or below the few that are more than twice as high as all others."""
    ranked = sorted(values)
    rest = ranked[len(ranked) - 1 - len(ranked) // MAX_CUT_SHARE]
    return ranked[-1] if ranked[-1] <= 2 * rest or rest <= 0 else rest


def ends(lowest: float, highest: float) -> tuple[float, float]:
    """The panel's lower and upper end: round numbers, with 0 between them or as one of them."""
    bottom = -round_up(-lowest, parts=1) if lowest < 0 else 0.0  # one digit: a minus has room then
    return bottom, 0.0 if bottom and highest <= 0 else round_up(highest)


def scale(low: float, top: float) -> dict[float, str]:
    """What is written at which height: the ends, and 0 where it has room. Below or above a 0 that is hardly within the
    panel, 0 stands for that end.
    """
    height = top - low
    labels = {low: f"−{-low:g}", top: f"{top:g}"}
    written = {end: label for end, label in labels.items() if abs(end) > HAIR * height}
    has_room = all(abs(end) >= LABEL * height for end in written)
    return {0.0: "0" if has_room else "", **written}


def batch_line(training: Rows, style: Style) -> dict[str, Any]:
    """The look of a line through every iteration; thin in a long run, whose noise would otherwise become an area."""
    return {"color": style.muted, "alpha": 0.4, "linewidth": 0.9 if len(training) <= LONG_RUN else 0.5, "zorder": 2}


def draw_panel(axes: Axes, panel: Panel, xs: Sequence[float], training: Rows, style: Style) -> None:
    values = [value_of(row, panel) for row in training]
    known = [value for value in values if not math.isnan(value)]
    axes.plot(xs, values, **batch_line(training, style))
    axes.plot(xs, rolling_median(values, window_of(training)), color=style.curve, linewidth=1.7, zorder=4)
    highest = [highest_shown(known)]
    if panel.beside:
        second = [math.nan if row.get(panel.beside) is None else float(row[panel.beside]) for row in training]
        smooth = rolling_median(second, window_of(training))
        axes.plot(xs, smooth, color=style.ink, linewidth=1.2, linestyle="--", zorder=3)
        highest += [value for value in second if not math.isnan(value)]
    low, top = (0.0, 1.0) if panel.is_share else ends(min(known), max(highest))
    ticks = {low: "0%", top: "100%"} if panel.is_share else scale(low, top)
    _mark_cut(axes, [(value, x) for x, value in zip(xs, values, strict=True) if value > top], style)
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.set_ylim(low - 0.04 * (top - low), top + 0.04 * (top - low))
    _name(axes, panel.name, panel.unit if any(known) else "0 throughout", style)


def _mark_cut(axes: Axes, cut: Sequence[tuple[float, float]], style: Style) -> None:
    if not cut:
        return
    edge, xs = axes.get_xaxis_transform(), [x for _, x in cut]
    look: dict[str, Any] = {"color": style.curve, "clip_on": False, "zorder": 5}
    axes.plot(xs, [1.0] * len(xs), "^", transform=edge, markersize=4.5, markeredgewidth=0, **look)
    value, x = max(cut)
    write(axes, f"{value:.2g}", (x, 1), (5, -1), color=style.curve, size=7.5, coords=edge, va="center", zorder=5)


def round_up(value: float, *, parts: int = 2) -> float:
    """The next number at or above `value` of one digit, or of that and a half: 83 → 85, 0.126 → 0.15; 0 → 1. With one
    of the `parts` of a digit: 83 → 90.
    """
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    # Digits of a decimal, so that 0.15 stays 0.15 and not 0.15000000000000002.
    return float(f"{math.ceil(parts * (value / unit) - 1e-9) / parts * unit:.6g}")


def panel_name_width(panel: Panel, style: Style) -> float:
    return max(words_width(panel.name, SMALL), words_width(panel.unit, TINY)) if style.is_wide else 0.0


def _name(axes: Axes, name: str, unit: str, style: Style) -> None:
    if style.is_wide:
        write(axes, name, (1, 0.5), (13, 1), color=style.ink, size=SMALL, va="bottom")
        write(axes, unit, (1, 0.5), (13, -2), color=style.muted, size=TINY, va="top")
    else:
        write(axes, f"{name}, {unit}", (0, 1), (0, 5), color=style.muted, size=TINY, va="bottom")
