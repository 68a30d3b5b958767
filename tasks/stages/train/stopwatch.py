"""Seconds of the parts of each iteration, for artifacts/timings: metrics hold none, since the same seed gives the same.

Where batches are collected ahead of the trainer, collecting is in a thread of its own, beside the iteration.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from tasks.core.records import Group

Function = TypeVar("Function", bound=Callable[..., Any])


class Stopwatch:
    """Rows by iteration: seconds of giving the engine its weights (of a run that collects in turn), collecting, waiting
    for a batch that is collected ahead, saving, all of the iteration, and of the rest, which is the update; and those
    in which trainer and engines were idle.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.by_iteration: dict[int, dict[str, Any]] = defaultdict(dict)
        self.engine_seconds = 0.0

    @contextmanager
    def time(self, iteration: int, part: str, *, without: str = "") -> Iterator[None]:
        """Add to what the part took so far, less what the part `without` took in it."""
        row, since = self.by_iteration[iteration], self.now()
        other = row.get(without, 0.0)
        yield
        row[part] = row.get(part, 0.0) + self.now() - since - (row.get(without, 0.0) - other)

    def timed(self, part: str, function: Function) -> Function:
        """A function of the iteration, and of more; its seconds are the part's."""

        def call(iteration: int, *arguments: Any) -> Any:
            with self.time(iteration, part):
                return function(iteration, *arguments)

        return cast(Function, call)

    def note_batch(self, iteration: int, groups: Sequence[Group], *, engine_seconds: float) -> None:
        """`engine_seconds`: in which turns were written, since the run began."""
        row, before = self.by_iteration[iteration], self.engine_seconds
        self.engine_seconds = engine_seconds
        row["episodes"] = sum(len(group.trajectories) for group in groups)
        row["engine_idle_seconds"] = max(0.0, row["iteration_seconds"] - (engine_seconds - before))
        row["trainer_idle_seconds"] = _waited(row)

    def idle(self, iteration: int) -> dict[str, float]:
        """Seconds of an iteration in which the trainer waited for episodes, and in which no engine wrote."""
        return {name: value for name, value in self.by_iteration[iteration].items() if name.endswith("_idle_seconds")}

    def idle_in_all(self) -> dict[str, float]:
        """As `idle`, and the seconds of the iterations, over all that this process trained."""
        rows = self.rows()
        names = ("iteration_seconds", "trainer_idle_seconds", "engine_idle_seconds")
        return {name: sum(row.get(name, 0.0) for row in rows) for name in names}

    def rows(self) -> list[dict[str, Any]]:
        """Of the iterations that this process trained, in order."""
        rows = ({"iteration": number, **row} for number, row in sorted(self.by_iteration.items()))
        return [{**row, "update_seconds": _rest(row)} for row in rows if "iteration_seconds" in row]


def _waited(row: dict[str, Any]) -> float:
    return float(row["wait_seconds"] if "wait_seconds" in row else row["refresh_seconds"] + row["collect_seconds"])


def _rest(row: dict[str, Any]) -> float:
    return float(row["iteration_seconds"] - _waited(row) - row.get("save_seconds", 0.0))
