"""Episodes on disk as soon as they end, so that a killed stage plays only what is missing.

One JSONL file of trajectories, each with its SHA-256, in the stage's resume folder (same settings and inputs). Not used
again: a last line that a kill cut short, damaged or altered episodes, which a warning names, and episodes that ended in
`environment_error`. All of them are played again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from tasks.core.files import atomic_file
from tasks.core.json_text import json_row
from tasks.core.records import Trajectory
from tasks.core.terminal import warn
from tasks.rollouts.conversation import EpisodeKey

EpisodeId = tuple[str, int]  # problem id and sample index
HASHED, EPISODE, END = b'{"sha256": "', b'", "episode": ', b"}\n"  # of a line


class FinishedEpisodes:
    """The episodes in `file`; `in` takes a problem and sample."""

    def __init__(self, file: Path):
        self.file = file
        self._places: dict[EpisodeId, int] = {}  # where the line of each begins
        self._size = 0  # of the file, in bytes
        if file.exists():
            self._keep_undamaged()

    def _keep_undamaged(self) -> None:
        with self.file.open("rb") as stream:
            lines = [line for line in stream if line.endswith(b"\n")]  # one that was cut short is none
        intact = [(text, line) for line in lines if (text := _text_of(line)) is not None]
        if num_damaged := len(lines) - len(intact):
            warn(
                f"warning: {self.file}: {num_damaged} of {len(lines)} kept lines are damaged or were altered. Their "
                f"episodes are played again; the others are used."
            )
        with atomic_file(self.file) as temporary, temporary.open("wb") as stream:
            for text, line in intact:
                if (row := from_json(text))["outcome"] != "environment_error":
                    stream.write(self._place(episode_id(row), line))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, episode: EpisodeId) -> bool:
        return episode in self._places

    def add(self, trajectory: Trajectory) -> None:
        """The system has the line when this returns, so a kill of this process does not lose it."""
        line = _line_of(json_row(trajectory.to_row()))
        self._stream.write(self._place((trajectory.problem_id, trajectory.sample_index), line))
        self._stream.flush()

    @cached_property
    def _stream(self) -> BinaryIO:
        """Open from the first episode to `close`: to open it for each took as long as to write it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.file.open("ab")

    def _place(self, episode: EpisodeId, line: bytes) -> bytes:
        """Note where the line is, which is written next."""
        self._places[episode] = self._size
        self._size += len(line)
        return line

    def close(self) -> None:
        """What is added later opens the file again. A stage has one for each snapshot, and a process few open files."""
        if "_stream" in vars(self):
            self._stream.close()
            del self._stream

    def forget(self) -> None:
        self.close()
        self.file.unlink(missing_ok=True)
        self._places, self._size = {}, 0

    def read(self, episodes: Sequence[EpisodeId]) -> list[Trajectory]:
        """Those asked for, in order. ValueError where the file was damaged since it was opened."""
        return [Trajectory.from_row(from_json(text)) for text in self._texts(episodes)]

    def copy(self, episodes: Sequence[EpisodeId], target: Path) -> None:
        """Write those asked for, in order, as `write_jsonl` would, without reading them. ValueError as in `read`."""
        with atomic_file(target) as temporary, temporary.open("wb") as stream:
            stream.writelines(text + b"\n" for text in self._texts(episodes))

    def _texts(self, episodes: Sequence[EpisodeId]) -> Iterator[bytes]:
        if not episodes:
            return
        with self.file.open("rb") as stream:
            for episode in episodes:
                stream.seek(self._places[episode])
                text = _text_of(stream.readline())
                if text is None:
                    raise ValueError(
                        f"{self.file}: an episode of it ({episode[0]!r}) was damaged or altered while the stage ran. "
                        f"Run the stage again: it is played again, and the others are used."
                    )
                yield text


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


def _line_of(text: bytes) -> bytes:
    """Its hash is over the very text."""
    return HASHED + hashlib.sha256(text).hexdigest().encode() + EPISODE + text + END


def _text_of(line: bytes) -> bytes | None:
    """An episode's JSON; None where it differs from what was written."""
    text = line.removesuffix(END).partition(EPISODE)[2]
    return text if _line_of(text) == line else None


def episode_id(row: Mapping[str, Any]) -> EpisodeId:
    return row["problem_id"], row["sample_index"]
