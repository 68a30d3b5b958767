"""Episodes on disk as soon as they end, so that a stage that was killed plays only what is missing.

One JSONL file of trajectories, appended to; it belongs in the stage's resume folder, whose name says that settings and
inputs are the same. Left out of what is taken up again: a last line that a kill cut short, and episodes that ended in
`environment_error`, since they are ours to repeat and not results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.records import Trajectory
from tasks.rollouts.conversation import EpisodeKey
from tasks.storage import write_jsonl

EpisodeId = tuple[str, int]  # problem id and sample index


class FinishedEpisodes:
    """The episodes in `file`; `len` counts them, `in` asks for one by its problem and sample."""

    def __init__(self, file: Path):
        self.file = file
        rows = {_id(row): row for row in _rows(file) if row["outcome"] != "environment_error"}
        if file.exists():
            write_jsonl(file, rows.values())
        self._ids = set(rows)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, episode: EpisodeId) -> bool:
        return episode in self._ids

    def add(self, trajectory: Trajectory) -> None:
        """Keep it. The line is with the system when this returns, so a kill of this process cannot take it back."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(trajectory.to_row(), ensure_ascii=False, allow_nan=False)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        self._ids.add((trajectory.problem_id, trajectory.sample_index))

    def forget(self) -> None:
        """None of them is what it was taken for."""
        self.file.unlink(missing_ok=True)
        self._ids.clear()

    def read(self, episodes: Iterable[EpisodeId]) -> list[Trajectory]:
        """Those asked for, in the order asked."""
        order = {episode: number for number, episode in enumerate(episodes)}
        found = {_id(row): Trajectory.from_row(row) for row in _rows(self.file) if _id(row) in order}
        return [found[episode] for episode in order]


def missing_of(keys: Sequence[EpisodeKey], finished: FinishedEpisodes | None) -> list[EpisodeKey]:
    """The keys that have still to be played."""
    return [key for key in keys if finished is None or (key.problem.id, key.sample_index) not in finished]


def with_finished(
    keys: Sequence[EpisodeKey], played: Sequence[Trajectory], finished: FinishedEpisodes | None
) -> list[Trajectory]:
    """What was played and what had been before, in the order of the keys."""
    found = {(trajectory.problem_id, trajectory.sample_index): trajectory for trajectory in played}
    episodes = [(key.problem.id, key.sample_index) for key in keys]
    before = [episode for episode in episodes if episode not in found]
    if finished is not None and before:
        found |= dict(zip(before, finished.read(before), strict=True))
    return [found[episode] for episode in episodes]


def _rows(file: Path) -> Iterable[dict[str, Any]]:
    if not file.exists():
        return
    with file.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):  # a line that was cut short is no episode
                yield json.loads(line)


def _id(row: dict[str, Any]) -> EpisodeId:
    return row["problem_id"], row["sample_index"]
