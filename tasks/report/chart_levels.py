"""Results on `test` beside the progress chart's curve: for each a line, a diamond with whiskers, and a name.

Close results must not overlap: whiskers are side by side, names above one another, each joined to its diamond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.report.drawing import TEXT, TINY, Style, apart, panel_size, words_width, write
from tasks.report.results import POLICIES, StoredResults, interval, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches: last step to first whisker, whisker to whisker, edge to names, and the least distance of two names.
EDGE, LANE, NAMES, LABEL = 0.26, 0.17, 0.18, 0.37


@dataclass(frozen=True, slots=True)
class Level:
    policy: str
    name: str
    result: dict[str, Any]
    color: str

    @property
    def rate(self) -> float:
        return float(self.result["success_rate"])

    def span(self, mark: float) -> tuple[float, float]:
        """What whiskers and diamond cover; at least `mark` to both sides of the rate."""
        low, high = self.result["ci_low"], self.result["ci_high"]
        return min(low, self.rate - mark), max(high, self.rate + mark)


def levels_of(results: StoredResults, style: Style) -> list[Level]:
    levels = [Level(name, POLICIES[name], result, getattr(style, name)) for name, result in results.test.items()]
    if results.champion_before is not None:
        name = f"champion v{results.champion_before['version']}"
        levels.append(Level("champion", name, results.champion_before["result"], style.champion))
    if results.frontier is not None:
        levels.append(Level("frontier", "frontier", results.frontier["result"], style.frontier))
    if results.reflexion is not None:
        tries = f"{results.reflexion['num_attempts']} tries"
        levels.append(Level("reflexion", f"Reflexion, {tries}", results.reflexion["result"], style.reflexion))
        levels.append(Level("retries", f"{tries}, no notes", results.reflexion["retries"], style.reflexion))
    return levels


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each span the first lane in which it overlaps no earlier one, so that whiskers do not hide each other."""
    taken: list[list[tuple[float, float]]] = []
    chosen = []
    for low, high in spans:
        free = (all(high < a or low > b for a, b in lane) for lane in taken)
        number = next((number for number, is_free in enumerate(free) if is_free), len(taken))
        if number == len(taken):
            taken.append([])
        taken[number].append((low, high))
        chosen.append(number)
    return chosen


def names_width(levels: Sequence[Level], style: Style) -> float:
    labels = [_label(level, style) for level in levels]
    return max(max(words_width(first, TEXT, "bold"), words_width(second, TINY)) for first, second in labels)


def draw_levels(axes: Axes, levels: Sequence[Level], last: int, style: Style) -> None:
    """A dashed line from each result to a diamond with whiskers; best's is dotted and starts where its curve ends."""
    (width, tall), (low, high) = panel_size(axes), axes.get_ylim()
    unit = (high - low) / tall  # per inch of the y axis
    ranked = sorted(levels, key=lambda level: level.policy != "best")  # best has the first lane
    spans = [level.span(0.08 * unit) for level in ranked]
    lane = dict(zip((level.policy for level in ranked), lanes(spans), strict=True))
    # Of the x axis; a base that was passed on untrained has a curve of no length.
    inch = max(last, 1) / (width - EDGE - LANE * (1 + max(lane.values())))
    axes.set_xlim(0, inch * width)
    heights = apart([level.rate for level in levels], gap=LABEL * unit)
    for level, height in zip(levels, heights, strict=True):
        x, is_best = last + (EDGE + LANE * lane[level.policy]) * inch, level.policy == "best"
        look: dict[str, Any] = {"color": level.color, "clip_on": False}
        start, dashes = (last, (1, 1.5)) if is_best else (0, (5, 3))
        axes.plot([start, x], [level.rate] * 2, linewidth=1.4, dashes=dashes, zorder=4, **look)
        axes.vlines(x, level.result["ci_low"], level.result["ci_high"], linewidth=1.8, zorder=7, **look)
        axes.plot([x], [level.rate], "D", markersize=8 if is_best else 5.5, markeredgewidth=0, zorder=8, **look)
        if abs(height - level.rate) > 0.1 * unit:
            ends = [x, (width + NAMES - 0.05) * inch], [level.rate, height]
            axes.plot(*ends, linewidth=0.7, alpha=0.6, zorder=6, **look)
        _name_level(axes, height, level, style)


def _name_level(axes: Axes, height: float, level: Level, style: Style) -> None:
    first, second = _label(level, style)
    beside: dict[str, Any] = {"coords": axes.get_yaxis_transform()}
    write(
        axes,
        first,
        (1, height),
        (72 * NAMES, 0),
        color=level.color,
        size=TEXT,
        fontweight="bold",
        va="bottom",
        **beside,
    )
    write(axes, second, (1, height), (72 * NAMES, -1), color=style.muted, size=TINY, va="top", **beside)


def _label(level: Level, style: Style) -> tuple[str, str]:
    """Two lines beside a level: its rate and name with the interval below; where that is too wide only the name."""
    if style.is_wide:
        return f"{percent(level.rate)} {level.name}", interval(level.result)
    return percent(level.rate), level.name
