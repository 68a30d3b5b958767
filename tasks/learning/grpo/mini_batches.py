"""Which groups an optimizer step takes: `train.steps_per_batch` divides a batch into mini-batches of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tasks.learning.shared.batching import Row

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of each group that carries loss, and the sampled tokens of each trajectory in its dropped groups."""

    rows: Sequence[list[Row]]
    dropped_lengths: list[int]


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


def _split(items: Sequence[Item], cuts: Sequence[int]) -> list[Sequence[Item]]:
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]
