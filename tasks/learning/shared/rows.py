"""What the trainers read of an episode: one row per token sequence that the policy wrote in.

Most episodes have one. The rows of an episode may be in different trees, micro-batches and ranks, so each says how many
tokens are in the others and whether it is the first: weights by episode then need nothing but rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.core.records import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence with at least one sampled token; `num_beside` counts those of its episode's other rows."""

    token_ids: list[int]
    sampled_mask: list[bool]
    sampler_logp: list[float]
    advantage: float | list[float]  # of all sampled tokens, or of each
    num_beside: int = 0
    is_first: bool = True  # of its episode

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled_mask)


def episode_rows(rows: Sequence[Row]) -> list[Row]:
    """Those of one episode that have a sampled token, each told of the others."""
    counts = [row.num_sampled for row in rows]
    kept = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
    return [
        replace(row, num_beside=sum(counts) - count, is_first=number == 0) for number, (row, count) in enumerate(kept)
    ]


def rows_of(trajectory: Trajectory, advantage: float) -> list[Row]:
    """One per sequence that the policy wrote in."""
    return episode_rows(
        [Row(item.token_ids, item.sampled_mask, item.sampler_logp, advantage) for item in trajectory.sequences]
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
