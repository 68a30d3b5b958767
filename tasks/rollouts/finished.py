"""Episodes on disk as soon as they end, so that a killed stage plays only what is missing.

One JSONL file of trajectories, each with its SHA-256, in the stage's resume folder (same settings and inputs). Not used
again: a last line that a kill cut short, damaged or altered episodes, which a warning names, and episodes that ended in
`environment_error`. All of them are played again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from tasks.core.files import atomic_file
from tasks.core.records import Trajectory
from tasks.core.terminal import warn
from tasks.rollouts.conversation import EpisodeKey

EpisodeId = tuple[str, int]  # problem id and sample index
HASHED, EPISODE, END = b'{"sha256": "', b'", "episode": ', b"}\n"  # of a line


class FinishedEpisodes:
    """The episodes in `file`; `in` takes a problem and sample."""

    def __init__(self, file: Path):
        self.file = file
        kept = list(_kept(file))
        rows = {episode_id(row): row for row in kept if row is not None and row["outcome"] != "environment_error"}
        if num_damaged := kept.count(None):
            warn(
                f"warning: {file}: {num_damaged} of {len(kept)} kept lines are damaged or were altered. Their episodes "
                f"are played again; the others are used."
            )
        if file.exists():
            with atomic_file(file) as temporary:
                temporary.write_bytes(b"".join(map(_line, rows.values())))
        self._ids = set(rows)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, episode: EpisodeId) -> bool:
        return episode in self._ids

    def add(self, trajectory: Trajectory) -> None:
        """The system has the line when this returns, so a kill of this process does not lose it."""
        self._stream.write(_line(trajectory.to_row()))
        self._stream.flush()
        self._ids.add((trajectory.problem_id, trajectory.sample_index))

    @cached_property
    def _stream(self) -> BinaryIO:
        """Open from the first episode on: to open it for each took as long as to write it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.file.open("ab")

    def forget(self) -> None:
        if "_stream" in vars(self):
            self._stream.close()
            del self._stream
        self.file.unlink(missing_ok=True)
        self._ids.clear()

    def read(self, episodes: Iterable[EpisodeId]) -> list[Trajectory]:
        """Those asked for, in order. ValueError where the file was damaged since it was opened."""
        order = {episode: number for number, episode in enumerate(episodes)}
        rows = (row for row in _kept(self.file) if row is not None)
        found = {episode_id(row): Trajectory.from_row(row) for row in rows if episode_id(row) in order}
        if len(found) < len(order):
            raise ValueError(
                f"{self.file}: {len(order) - len(found)} of its episodes were damaged or altered while the stage ran. "
                f"Run the stage again: they are played again, and the others are used."
            )
        return [found[episode] for episode in order]


def find_missing(keys: Sequence[EpisodeKey], finished: FinishedEpisodes | None) -> list[EpisodeKey]:
    return [key for key in keys if finished is None or (key.problem.id, key.sample_index) not in finished]


def merge_finished(
    keys: Sequence[EpisodeKey], played: Sequence[Trajectory], finished: FinishedEpisodes | None
) -> list[Trajectory]:
    found = {(trajectory.problem_id, trajectory.sample_index): trajectory for trajectory in played}
    episodes = [(key.problem.id, key.sample_index) for key in keys]
    before = [episode for episode in episodes if episode not in found]
    if finished is not None and before:
        found |= dict(zip(before, finished.read(before), strict=True))
    return [found[episode] for episode in episodes]


def _line(row: dict[str, Any]) -> bytes:
    """A JSON object whose hash is over the very text of its episode, so the row is written once and read once."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    return HASHED + hashlib.sha256(text).hexdigest().encode() + EPISODE + text + END


def _kept(file: Path) -> Iterator[dict[str, Any] | None]:
    """The row of each whole line, None for one that differs from what was written."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):  # skip a line that was cut short
                yield _row_of(line)


def _row_of(line: bytes) -> dict[str, Any] | None:
    before, found, text = line.removesuffix(END).partition(EPISODE)
    if not found or before != HASHED + hashlib.sha256(text).hexdigest().encode():
        return None
    row: dict[str, Any] = json.loads(text)
    return row


def episode_id(row: Mapping[str, Any]) -> EpisodeId:
    return row["problem_id"], row["sample_index"]
