"""Progress bars, plain lines if the output is not a terminal; and durations as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tasks.core.console import SafeConsole


class Bar:
    def __init__(self, progress: Progress, label: str, total: int, done: int):
        self._progress = progress
        self._id = progress.add_task(label, total=total, completed=done, detail="")

    def advance(self, detail: str = "") -> None:
        self._progress.update(self._id, advance=1, detail=detail)


@contextmanager
def progress_bar(label: str, *, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar on standard error that remains after the block; a resumed run starts at `done`."""
    progress = Progress(
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
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
