"""Reads stored trajectories, and computes their rewards and the tokens of each turn without a model. Records contain no
reward, since the weights may change. Used to show and export trajectories; training uses records as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.files import read_jsonl
from tasks.core.records import Problem, Score, TokenSequence, Trajectory, Turn
from tasks.core.settings import Paths
from tasks.rewards.built_in import NotCounted
from tasks.rewards.parts import reward
from tasks.rewards.settings import RewardSettings

SPLITS = ("test", "select", "train")
SAMPLED_RUN = re.compile(rb"\x01+")


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Where the sampled tokens of a turn are, from `start` to before `end` of its sequence."""

    sequence: TokenSequence
    start: int
    end: int

    @property
    def num_read(self) -> int:
        return self.start

    @property
    def num_sampled(self) -> int:
        return self.end - self.start

    @property
    def prompt_ids(self) -> list[int]:
        return self.sequence.token_ids[: self.start]

    @property
    def sampled_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def sampler_logp(self) -> list[float]:
        return self.sequence.sampler_logp[self.start : self.end]


def read_trajectories(file: Path, *, is_only_shown: bool = False) -> Iterator[tuple[int, Trajectory]]:
    """(line, trajectory), in order; ValueError names an invalid line. Bytes that are not UTF-8, such as from a tool's
    reply, are refused, or U+FFFD if `is_only_shown`.
    """
    for number, row in read_jsonl(file, is_only_shown=is_only_shown):
        try:
            yield number, Trajectory.from_row(row)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{file}, line {number}: is not a trajectory as turnwise stores them ({error}), so it cannot be read. "
                f"Name a file such as artifacts/evaluate/trajectories/test_best.jsonl, or run the stage that wrote it."
            ) from None


def turn_tokens(trajectory: Trajectory) -> list[TurnTokens]:
    """The tokens of each turn in its sequence; empty if there are none, or not one run per turn. A cut thought and its
    message are two runs, with the ids that closed the thought between them.
    """
    left = [iter(SAMPLED_RUN.finditer(bytes(sequence.sampled_mask))) for sequence in trajectory.sequences]
    try:
        found = [
            _next_turn(turn, trajectory.sequences[turn.sequence], left[turn.sequence]) for turn in trajectory.turns
        ]
    except (StopIteration, IndexError):
        return []
    return [] if any(next(runs, None) for runs in left) else found


def _next_turn(turn: Turn, sequence: TokenSequence, runs: Iterator[re.Match[bytes]]) -> TurnTokens:
    first = next(runs)
    last = next(runs) if turn.thought_was_cut else first
    return TurnTokens(sequence, first.start(), last.end())


class Rescorer:
    """Rewards of stored trajectories. Reads the curated problems once."""

    def __init__(self, paths: Paths, settings: RewardSettings, splits: Sequence[str] = SPLITS):
        self.settings = settings
        self._rows = {
            row["id"]: row for split in splits if (file := paths.split(split)).exists() for _, row in read_jsonl(file)
        }

    def score(self, trajectory: Trajectory) -> Score | None:
        """None if this project has no such problem, or the episode was lost to an environment fault."""
        row = self._rows.get(trajectory.problem_id)
        if row is None or trajectory.is_lost:
            return None
        if not trajectory.is_of(request=row["requests"][0], category=row["category"], split_group=row["split_group"]):
            return None
        return reward(Problem.model_validate(row), trajectory, self.settings)

    def shown_score(self, trajectory: Trajectory) -> Score | None:
        """To show beside others: also None where an endpoint counted no tokens. A frontier model is never trained on,
        so what its reward would have been may stay unknown.
        """
        try:
            return self.score(trajectory)
        except NotCounted:
            return None
