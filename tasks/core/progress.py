"""Progress bars, plain lines if the output is not a terminal; and durations as text.

Where a flow started the program, a bar also writes how far it is into the file that PROGRESS_VARIABLE names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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

PROGRESS_VARIABLE = "TURNWISE_PROGRESS_FILE"
WRITE_SECONDS = 2.0


class Bar:
    def __init__(self, progress: Progress, label: str, total: int, done: int):
        self._progress = progress
        self._id = progress.add_task(label, total=total, completed=done, detail="")
        self._label, self._total, self._done = label, total, done
        self._file, self._next_write = os.environ.get(PROGRESS_VARIABLE), 0.0

    def advance(self, detail: str = "") -> None:
        self._progress.update(self._id, advance=1, detail=detail)
        self._done += 1
        if self._file and time.monotonic() >= self._next_write:
            row = {"label": self._label, "done": self._done, "total": self._total, "detail": detail}
            with suppress(OSError):  # it is only for the eye
                write_json(Path(self._file), row)
            self._next_write = time.monotonic() + WRITE_SECONDS


class _Detail(ProgressColumn):
    """Cut where the line is too long for it: how far a stage is and how long it takes matter more."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["detail"], no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(label: str, *, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar on standard error that remains after the block; a resumed run starts at `done`."""
    progress = Progress(
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _Detail(),
        console=SafeConsole(stderr=True),
        refresh_per_second=4,
    )
    with progress:
        yield Bar(progress, label, total, done)


def spell(seconds: float) -> str:
    """`40 s`, `7 min`, `3.5 h`, `12 days`."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}" if unit == "h" else f"{max(1, seconds / length):.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"


def span(told: Callable[[float], str], least: float, most: float) -> str:
    """`3 min to 9 min`; one of them where both read the same."""
    return " to ".join(dict.fromkeys((told(least), told(most))))
