"""Which groups an optimizer step takes: `train.steps_per_batch` divides a batch into mini-batches of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, islice
from typing import TypeVar

import numpy as np

from tasks.core.records import Group, Trajectory
from tasks.learning.grpo.credit import carries_loss, group_credit
from tasks.learning.shared.rows import Row, episode_rows
from tasks.learning.shared.settings import GRPOSettings

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of a group that carries loss. `too_old`: the sampled tokens of each of its episodes without a row."""

    rows: list[Row]
    too_old: list[int]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of each group that carries loss, and what was dropped: the sampled tokens of each episode."""

    rows: Sequence[list[Row]]
    dropped_lengths: list[int]


def oldest_version(settings: GRPOSettings, iteration: int) -> int | None:
    """Of the tokens that carry loss. None where whole batches are collected: one with an older token is refused."""
    return iteration - 1 - settings.max_staleness if settings.streaming else None


def divide(
    groups: Sequence[Group], settings: GRPOSettings, *, iteration: int
) -> tuple[list[GroupRows], list[list[int]]]:
    """The groups that carry loss, and the sampled tokens of each episode of each dropped group.

    Dropped groups count in the denominator: else the gradient would grow as groups become equal. Replaced groups are no
    part of the batch (DAPO). With `zero_variance_groups: keep` equal groups carry their KL, where it has a weight.
    Tokens too old for the `iteration` carry no loss, nor does a trajectory that has no others; their rewards are
    compared all the same, and they count in the denominator of their group's step.
    """
    oldest = oldest_version(settings, iteration)
    last_round = max((group.round_number for group in groups), default=0)
    with_loss: list[GroupRows] = []
    dropped_lengths: list[list[int]] = []
    carry_kl = settings.zero_variance_groups == "keep" and settings.kl_weight > 0
    for group in groups:
        advantages = group_credit(group, settings)
        triples = zip(group.trajectories, advantages, carries_loss(group, settings), strict=True)
        counted = [(item, _rows(item, advantage, oldest)) for item, advantage, is_counted in triples if is_counted]
        kept = [row for _, of_episode in counted for row in of_episode]
        has_credit = any(map(np.any, advantages)) or carry_kl
        if has_credit and kept:
            too_old = [item.num_sampled_tokens for item, of_episode in counted if not of_episode]
            with_loss.append(GroupRows(kept, too_old))
        elif has_credit or group.round_number == last_round:
            dropped_lengths.append([item.num_sampled_tokens for item, _ in counted])
    return with_loss, dropped_lengths


def mini_batches(
    groups: Sequence[GroupRows], dropped_lengths: Sequence[list[int]], *, num_steps: int
) -> list[MiniBatch]:
    """The groups that carry loss in `num_steps` even parts, in the order of the batch. Where fewer groups carry loss
    there are fewer parts: a step without loss would move the weights by momentum alone.

    Dropped groups are dealt out as evenly, since they count in the denominator of a step (infra/decisions/0036).
    """
    if not groups:
        return []
    count = min(num_steps, len(groups))
    with_loss = _split(groups, [-(-part * len(groups) // count) for part in range(1, count)])  # the first are larger
    dropped = _split(dropped_lengths, [part * len(dropped_lengths) // count for part in range(1, count)])  # the last
    return [
        MiniBatch(
            [group.rows for group in kept], [*chain(*(group.too_old for group in kept)), *chain.from_iterable(lengths)]
        )
        for kept, lengths in zip(with_loss, dropped, strict=True)
    ]


def _rows(trajectory: Trajectory, advantage: float | list[float], oldest: int | None) -> list[Row]:
    """One per sequence. Tokens of versions before `oldest` are attended to, and carry no loss."""
    rows: list[Row] = []
    left = iter(advantage) if isinstance(advantage, list) else None
    for sequence in trajectory.sequences:
        credit = advantage if left is None else [*islice(left, sequence.num_sampled_tokens)]
        row = Row(sequence.token_ids, sequence.sampled_mask, sequence.sampler_logp, credit)
        if oldest is not None and trajectory.policy_version < oldest:
            row = _without_old(row, [version >= oldest for version in trajectory.sampled_versions(sequence)])
        rows.append(row)
    return episode_rows(trajectory, rows)


def _without_old(row: Row, is_fresh: Sequence[bool]) -> Row:
    left = iter(is_fresh)
    mask = [is_sampled and next(left) for is_sampled in row.sampled_mask]
    credit = [*compress(row.advantage, is_fresh)] if isinstance(row.advantage, list) else row.advantage
    return replace(row, sampled_mask=mask, advantage=credit)


def _split(items: Sequence[Item], cuts: Sequence[int]) -> list[Sequence[Item]]:
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]
