"""Stored trajectories read back, and what can be told of one without running a model: its reward again, its tokens.

A record holds no reward, since training may weigh the parts otherwise tomorrow, and its tokens in one piece. Used by
what shows or hands on trajectories (`atif.py`, `tracking/traces.py`); training reads records as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.files import read_jsonl
from tasks.core.records import Problem, Score, Trajectory
from tasks.core.settings import Paths
from tasks.rewards.parts import reward
from tasks.rewards.settings import RewardSettings

SPLITS = ("test", "select", "train")
SAMPLED_RUN = re.compile(rb"\x01+")


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The tokens of one turn: the whole context before it, and what the policy sampled with its log-probs."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    sampler_logp: list[float]


def read_trajectories(file: Path, *, is_only_shown: bool = False) -> Iterator[tuple[int, Trajectory]]:
    """(line, trajectory), one after another; ValueError names a line that holds none.

    Bytes that are no UTF-8, which a tool's reply may have left there, are refused where the trajectory counts, and
    U+FFFD where it `is_only_shown`.
    """
    for number, row in read_jsonl(file, is_only_shown=is_only_shown):
        try:
            yield number, Trajectory.from_row(row)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{file}, line {number}: is not a trajectory as turnwise stores them ({error}), so it cannot be read. "
                f"Name a file such as artifacts/evaluate/trajectories/test_best.jsonl, or run the stage that wrote it."
            ) from None


def turn_spans(trajectory: Trajectory) -> list[tuple[int, int]] | None:
    """Where the tokens of each turn lie: the runs of sampled ones. None where they are not one run a turn."""
    spans = [found.span() for found in SAMPLED_RUN.finditer(bytes(trajectory.sampled_mask))]
    return spans if spans and len(spans) == len(trajectory.turns) else None


def turn_tokens(trajectory: Trajectory) -> list[TurnTokens]:
    """The tokens of each turn; empty where there are none, or not one run a turn."""
    ids, logp = trajectory.token_ids, trajectory.sampler_logp
    return [TurnTokens(ids[:start], ids[start:end], logp[start:end]) for start, end in turn_spans(trajectory) or ()]


class Rescorer:
    """The reward of stored trajectories. Reads the curated problems once; `score` is then a lookup and a sum."""

    def __init__(self, paths: Paths, settings: RewardSettings, splits: Sequence[str] = SPLITS):
        self.settings = settings
        self._rows = {
            row["id"]: row for split in splits if (file := paths.split(split)).exists() for _, row in read_jsonl(file)
        }

    def score(self, trajectory: Trajectory) -> Score | None:
        """None where this project has no such problem, and for an episode lost to a fault, which is never rewarded."""
        row = self._rows.get(trajectory.problem_id)
        is_ours = row is not None and row["requests"][0] == trajectory.request
        if not is_ours or trajectory.outcome == "environment_error":
            return None
        return reward(Problem.model_validate(row), trajectory, self.settings)
