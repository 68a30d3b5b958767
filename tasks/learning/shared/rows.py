"""What the trainers read of an episode: one row per token sequence that the policy wrote in.

Most episodes have one. The rows of an episode may be in different trees, micro-batches and ranks, so each says how many
other tokens its episode has and whether it is the first: weights by episode then need nothing but rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.core.records import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence with at least one sampled token that carries loss; `num_beside` counts those of its episode that are
    in other rows or carry none.
    """

    token_ids: list[int]
    sampled_mask: list[bool]
    sampler_logp: list[float]
    advantage: float | list[float]  # of all sampled tokens, or of each
    num_beside: int = 0
    is_first: bool = True  # of its episode

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled_mask)


def episode_rows(trajectory: Trajectory, rows: Sequence[Row]) -> list[Row]:
    """Of its rows those that have a sampled token, each told of the others."""
    length, counted = trajectory.num_sampled_tokens, [(row, row.num_sampled) for row in rows]
    kept = [(row, count) for row, count in counted if count]
    return [replace(row, num_beside=length - count, is_first=number == 0) for number, (row, count) in enumerate(kept)]


def rows_of(trajectory: Trajectory, advantage: float) -> list[Row]:
    """One per sequence that the policy wrote in."""
    sequences = trajectory.sequences
    return episode_rows(
        trajectory, [Row(item.token_ids, item.sampled_mask, item.sampler_logp, advantage) for item in sequences]
    )


def check_tokens(groups: Sequence[Group], *, vocabulary_size: int) -> None:
    """ValueError where a token is not in the vocabulary: on a GPU it would end the process without a message."""
    for trajectory in (item for group in groups for item in group.trajectories):
        tokens = (token for sequence in trajectory.sequences for token in sequence.token_ids)
        beyond = next((token for token in tokens if not 0 <= token < vocabulary_size), None)
        if beyond is not None:
            raise ValueError(
                f"problem {trajectory.problem_id!r}: its trajectory contains token {beyond} and the model has "
                f"{vocabulary_size:,}, so another model wrote it and this one cannot learn from it. Delete the stored "
                f"episodes (artifacts/.resume/train after a stopped run), or train the model that wrote them."
            )
