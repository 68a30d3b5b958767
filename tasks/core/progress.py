"""Progress bars, a line a minute where the output is no terminal; and durations as text.

Where a flow started the program, a bar also writes how far it is into the file that PROGRESS_VARIABLE names.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from tasks.core.console import SafeConsole
from tasks.core.files import write_json
from tasks.core.terminal import warn

PROGRESS_VARIABLE = "TURNWISE_PROGRESS_FILE"
WRITE_SECONDS = 2.0
LINE_SECONDS = 60.0  # between two lines of a log, and at least a tenth of the time so far: a day has about 60


class Bar:
    """How far a program is; looked at when it is drawn, since episodes end hundreds of times a second."""

    def __init__(self, label: str, total: int, done: int, *, in_lines: bool = False):
        self.label, self.total, self.done, self.detail = label, total, done, ""
        self._file, self._next_write = os.environ.get(PROGRESS_VARIABLE), 0.0
        self._began, self._before = time.monotonic(), done
        self._next_line = self._began + LINE_SECONDS if in_lines else math.inf

    def advance(self, detail: str = "") -> None:
        self.done += 1
        self.detail = detail
        now = time.monotonic()
        if self._file and now >= self._next_write:
            row = {"label": self.label, "done": self.done, "total": self.total, "detail": detail}
            with suppress(OSError):  # it is only for the eye
                write_json(Path(self._file), row)
            self._next_write = now + WRITE_SECONDS
        if now >= self._next_line and self.done < self.total:
            self._tell_line(now - self._began)
            self._next_line = now + max(LINE_SECONDS, 0.1 * (now - self._began))

    def _tell_line(self, seconds: float) -> None:
        left = spell(seconds / (self.done - self._before) * (self.total - self.done))
        told = f"{self.label}: {self.done:,} of {self.total:,} after {spell(seconds)}, about {left} left"
        warn(f"{told}; {' '.join(self.detail.split())}" if self.detail else told)


class _Shown(Progress):
    """Draws one bar as it is then."""

    def __init__(self, bar: Bar, *columns: ProgressColumn, **options: Any):
        self._bar: Bar | None = None  # until there is a task to draw it as
        super().__init__(*columns, **options)
        self._id = self.add_task(bar.label, total=bar.total, completed=bar.done, detail="")
        self._bar = bar

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._bar is not None:
            self.update(self._id, completed=self._bar.done, detail=self._bar.detail)
        return super().get_renderables()


class _Detail(ProgressColumn):
    """Cut where the line is too long for it: how far a stage is and how long it takes matter more."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["detail"], no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(label: str, *, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar on standard error that remains after the block; a resumed run starts at `done`."""
    console = SafeConsole(stderr=True)
    bar = Bar(label, total, done, in_lines=not console.is_terminal)
    with _Shown(
        bar,
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _Detail(),
        console=console,
        refresh_per_second=4,
    ):
        yield bar


def spell(seconds: float) -> str:
    """`40 s`, `7 min`, `3.5 h`, `12 days`."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}" if unit == "h" else f"{max(1, seconds / length):.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"


def span(told: Callable[[float], str], least: float, most: float) -> str:
    """`3 min to 9 min`; one of them where both read the same."""
    return " to ".join(dict.fromkeys((told(least), told(most))))
