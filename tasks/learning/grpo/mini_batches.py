"""Which groups an optimizer step takes: `train.steps_per_batch` divides a batch into mini-batches of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

import numpy as np

from tasks.core.records import Group, Trajectory
from tasks.learning.grpo.credit import carries_loss, group_credit
from tasks.learning.shared.batching import Row
from tasks.learning.shared.settings import GRPOSettings

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of each group that carries loss, and what was dropped: the sampled tokens of each trajectory."""

    rows: Sequence[list[Row]]
    dropped_lengths: list[int]


def oldest_version(settings: GRPOSettings, iteration: int) -> int | None:
    """Of the tokens that carry loss. None where whole batches are collected: one with an older token is refused."""
    return iteration - 1 - settings.max_staleness if settings.streaming else None


def divide(
    groups: Sequence[Group], settings: GRPOSettings, *, iteration: int = 0
) -> tuple[list[list[Row]], list[list[int]]]:
    """The rows of each group that carries loss, and the sampled tokens of each trajectory of each dropped group.

    Dropped groups count in the denominator: else the gradient would grow as groups become equal. Replaced groups are no
    part of the batch (DAPO). With `zero_variance_groups: keep` equal groups carry their KL. Tokens too old for
    the `iteration` carry none, nor does a trajectory that has no others; their rewards are compared all the same, and
    they count in the denominator as what is dropped does.
    """
    oldest = oldest_version(settings, iteration)
    last_round = max((group.round_number for group in groups), default=0)
    rows: list[list[Row]] = []
    dropped_lengths: list[list[int]] = []
    for group in groups:
        advantages = group_credit(group, settings)
        triples = zip(group.trajectories, advantages, carries_loss(group, settings), strict=True)
        counted = [(item, _row(item, advantage, oldest)) for item, advantage, is_counted in triples if is_counted]
        kept = [row for _, row in counted if any(row.sampled_mask)]
        has_credit = any(map(np.any, advantages)) or settings.zero_variance_groups == "keep"
        if has_credit and kept:
            rows.append(kept)
            if too_old := [length for length in (_num_too_old(*pair, settings) for pair in counted) if length]:
                dropped_lengths.append(too_old)
        elif has_credit or group.round_number == last_round:
            dropped_lengths.append([sum(item.sampled_mask) for item, _ in counted])
    return rows, dropped_lengths


def mini_batches(rows: Sequence[list[Row]], dropped_lengths: Sequence[list[int]], *, num_steps: int) -> list[MiniBatch]:
    """The groups that carry loss in `num_steps` even parts, in the order of the batch. Where fewer groups carry loss
    there are fewer parts: a step without loss would move the weights by momentum alone.

    Dropped groups are dealt out as evenly, since they count in the denominator of a step (infra/decisions/0036).
    """
    if not rows:
        return []
    count = min(num_steps, len(rows))
    with_loss = _split(rows, [-(-part * len(rows) // count) for part in range(1, count)])  # the first are larger
    dropped = _split(dropped_lengths, [part * len(dropped_lengths) // count for part in range(1, count)])  # the last
    return [
        MiniBatch(kept, [length for group in lengths for length in group])
        for kept, lengths in zip(with_loss, dropped, strict=True)
    ]


def _row(trajectory: Trajectory, advantage: float | list[float], oldest: int | None) -> Row:
    """Tokens of versions before `oldest` are attended to, and carry no loss."""
    row = Row.of(trajectory, advantage)
    if oldest is None or trajectory.policy_version >= oldest:
        return row
    is_fresh = [version >= oldest for version in trajectory.sampled_versions]
    left = iter(is_fresh)
    mask = [is_sampled and next(left) for is_sampled in trajectory.sampled_mask]
    credit = list(compress(advantage, is_fresh)) if isinstance(advantage, list) else advantage
    return replace(row, sampled_mask=mask, advantage=credit)


def _num_too_old(trajectory: Trajectory, row: Row, settings: GRPOSettings) -> int:
    """Tokens that the denominator counts beside those of the row. By `sequence` and `constant` it counts trajectories,
    so one that carries loss is there already.
    """
    num_fresh = sum(row.sampled_mask)
    return 0 if num_fresh and settings.aggregation != "token" else sum(trajectory.sampled_mask) - num_fresh


def _split(items: Sequence[Item], cuts: Sequence[int]) -> list[Sequence[Item]]:
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]
