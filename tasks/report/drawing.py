"""The style of every chart: colours, sizes, fonts, panels, labels that do not overlap, and files of stable bytes.

pyplot is not used: it would open a window system and costs most of a second. An SVG keeps text as text, in the reader's
font; its layout is for DejaVu Sans, which comes with matplotlib and is wider than the others, so no text is cut off. A
model's name in it is never read as a formula or as markup.
"""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.files import atomic_file
from tasks.core.settings import Paths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]
TITLE, TEXT, SMALL, TINY = 15, 10, 9, 8.5  # in points
MARGIN, LINE = 0.26, 0.2  # inches: from the paper's edge to words, and from one line of words to the next
GridAxis = Literal["both", "x", "y"]
LINES = ("#d0342c", "#d98200", "#2b59d9", "#8a3fb5", "#0b7a53", "#0f8a9d")  # where many lines need a colour each


@dataclass(frozen=True, slots=True)
class Style:
    """Colours and size of one rendering; the report shows the one that fits the reader's screen."""

    width: float = 9.0  # inches
    paper: str = "#ffffff"
    ink: str = "#1c2030"
    muted: str = "#6a7182"
    grid: str = "#e9ebf0"
    base: str = "#687083"
    warm_start: str = "#a86400"
    curve: str = "#2b59d9"
    light_curve: str = "#9db3ee"
    best: str = "#0b7a53"
    champion: str = "#b3261e"
    frontier: str = "#7c3aa8"
    reflexion: str = "#0f7f95"

    @property
    def is_wide(self) -> bool:
        return self.width > 6


LIGHT = Style()
DARK = Style(
    paper="#14171f", ink="#e8eaf0", muted="#98a0b3", grid="#272c38", base="#98a0b3", warm_start="#e0a030",
    curve="#7d9dff", light_curve="#4d5f99", best="#3ecf97", champion="#ff8a80", frontier="#c792ea",
    reflexion="#5cc8dd",
)  # fmt: skip
# For a phone: narrow, so that the words stay legible when the picture is as wide as the screen.
LIGHT_NARROW, DARK_NARROW = replace(LIGHT, width=4.6), replace(DARK, width=4.6)
FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


@contextmanager
def drawing(paths: Paths, form: Format = "png") -> Iterator[None]:
    keep_matplotlib_inside(paths)
    import matplotlib

    family = font() if form == "png" else FONTS[-1]
    options = {"font.family": family, "font.size": 10, "text.parse_math": False}
    with matplotlib.rc_context({**options, "svg.fonttype": "none", "svg.hashsalt": "turnwise"}):
        yield


def keep_matplotlib_inside(paths: Paths) -> None:
    """Matplotlib writes a font list when it is imported; nothing may be written outside the run's folder."""
    os.environ.setdefault("MPLCONFIGDIR", str((paths.artifacts / ".cache" / "matplotlib").absolute()))


def font() -> str:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return next(name for name in FONTS if name in installed)


def save_png(figure: Figure, out: Path) -> None:
    with atomic_file(out) as temporary:
        figure.savefig(temporary, format="png", facecolor=figure.get_facecolor())


def save_svg(figure: Figure, out: Path, *, title: str, description: str) -> None:
    """Without a date, so that equal pictures are equal bytes; `title` and `description` are for screen readers."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(written, format="svg", facecolor=figure.get_facecolor(), metadata=nothing)
    # Matplotlib's own head names a document type that some readers would fetch.
    _, _, body = written.getvalue().partition("<svg ")
    attributes, _, body = body.partition(">")
    families = ", ".join(f"'{name}'" for name in FONTS)
    with atomic_file(out) as temporary:
        temporary.write_text(
            f'<?xml version="1.0" encoding="utf-8"?>\n'
            f'<svg role="img" aria-labelledby="chart-title chart-description" {attributes}>\n'
            f' <title id="chart-title">{html.escape(title)}</title>\n'
            f' <desc id="chart-description">{html.escape(description)}</desc>'
            + body.replace(f"'{FONTS[-1]}'", f"{families}, sans-serif"),
            encoding="utf-8",
        )


def words_width(words: str, size: float, weight: Literal["normal", "bold"] = "normal") -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    look = FontProperties(size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(words, look, False)[0]) / 72


def new_figure(width: float, height: float, style: Style) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=200, facecolor=style.paper)


def draw_heading(figure: Figure, title: str, lines: Sequence[str], style: Style) -> None:
    left, inch = MARGIN / figure.get_figwidth(), 1 / figure.get_figheight()
    figure.text(left, 1 - 0.22 * inch, title, color=style.ink, fontsize=TITLE, fontweight="bold", va="top")
    for number, line in enumerate(lines):
        figure.text(left, 1 - (0.56 + LINE * number) * inch, line, color=style.muted, fontsize=TEXT, va="top")


def empty_panel(
    figure: Figure, left: float, top: float, width: float, height: float, style: Style, *, grid: GridAxis = "both"
) -> Axes:
    """Axes without a frame, with a grid, placed in inches from the figure's upper left corner."""
    wide, tall = figure.get_figwidth(), figure.get_figheight()
    axes = figure.add_axes((left / wide, 1 - (top + height) / tall, width / wide, height / tall))
    axes.set_facecolor(style.paper)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6, colors=style.muted, labelsize=SMALL)
    axes.spines[:].set_visible(False)
    axes.grid(axis=grid, color=style.grid, linewidth=0.9)
    return axes


def write(
    axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], *, color: str, size: float,
    coords: Any = "axes fraction", **look: Any,
) -> None:  # fmt: skip
    axes.annotate(
        words, at, offset, xycoords=coords, textcoords="offset points", annotation_clip=False, color=color,
        fontsize=size, **look,
    )  # fmt: skip


def panel_size(axes: Axes) -> tuple[float, float]:
    place, figure = axes.get_position(), axes.get_figure(root=True)
    assert figure is not None
    return float(place.width * figure.get_figwidth()), float(place.height * figure.get_figheight())


def spread(heights: list[float], *, gap: float) -> list[float]:
    """The heights, moved upwards as little as keeps each at least `gap` above the one below, in the same order."""
    placed: dict[int, float] = {}
    lowest = float("-inf")
    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        lowest = placed[index] = max(heights[index], lowest + gap)
    return [placed[index] for index in range(len(heights))]


def apart(heights: list[float], *, gap: float) -> list[float]:
    """The heights in order, moved until each is `gap` from the next and, where there is room, in 0..1."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    ranked = [heights[index] for index in order]
    ranked = [(up + down) / 2 for up, down in zip(spread(ranked, gap=gap), _spread_down(ranked, gap), strict=True)]
    ranked = spread([max(0.0, height) for height in ranked], gap=gap)
    ranked = _spread_down([min(1.0, height) for height in ranked], gap)
    return [height for _, height in sorted(zip(order, ranked, strict=True))]


def _spread_down(heights: list[float], gap: float) -> list[float]:
    return [-height for height in spread([-height for height in reversed(heights)], gap=gap)][::-1]
