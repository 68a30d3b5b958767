"""What the in-process engine reads: prompts and long tool replies, in forwards of bounded size apart from the steps.

A prompt's start is a causal forward side by side with others; what is beyond the limit, and long replies, are fed in
chunks that attend to the cache. Text that several episodes start with is computed once and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.memory import ForwardLimits, batch_prompts, batch_replies
from tasks.engines.transformers.rows import Row, Rows, waves


class Reader:
    """Feeds the rows of one cache; `to_tensor` puts numbers on the model's device, `numbers_T` counts there."""

    def __init__(
        self,
        decoder: Decoder,
        rows: Rows,
        limits: ForwardLimits,
        *,
        numbers_T: Tensor,
        to_tensor: Callable[[Sequence[int] | Sequence[Sequence[int]]], Tensor],
    ):
        self.decoder, self.rows, self.limits = decoder, rows, limits
        self.numbers_T, self.to_tensor = numbers_T, to_tensor

    def read(self, entered: list[Row]) -> None:
        """All text of these rows, and of those already there, but what the next step takes."""
        sources = self.rows.sources(entered)
        for ready in waves(entered, sources):
            self._prefill([row for row in ready if row.episode not in sources])
            for row in ready:
                if row.episode in sources:
                    self._copy_start(row, *sources[row.episode])
            self._feed_long(ready)
        self._feed_long(self.rows.live)

    def _copy_start(self, row: Row, source: Row, length: int) -> None:
        row.fed = min(length, source.fed)
        if row.fed:
            self.rows.cache.move(self.rows.slot[source.episode], self.rows.slot[row.episode], row.fed)

    def _prefill(self, rows: list[Row]) -> None:
        """Right-padded causal forwards: padded positions are beyond their row's length and never read."""
        rows = [row for row in rows if row.num_to_feed]
        lengths = [self.limits.width(row.num_to_feed) for row in rows]
        for batch in batch_prompts(lengths, self.limits):
            width = max(lengths[number] for number in batch)
            ids = [[*rows[number].ids[: lengths[number]], *[0] * (width - lengths[number])] for number in batch]
            found = self.decoder.prefill(self.to_tensor(ids), self.numbers_T[:width])
            for place, number in enumerate(batch):
                row = rows[number]
                row.fed = lengths[number]
                self.rows.cache.fill(self.rows.slot[row.episode], found, place, row.fed)

    def _feed_long(self, rows: list[Row]) -> None:
        """Replies of similar length in one forward, those too long for one in several."""
        while long := [row for row in rows if not row.is_waiting and row.num_to_feed > self.limits.in_step]:
            batch, width = batch_replies([row.num_to_feed for row in long], [row.fed for row in long], self.limits)
            self._feed([long[number] for number in batch], width)

    def _feed(self, rows: list[Row], width: int) -> None:
        cache, slots = self.rows.cache, [self.rows.slot[row.episode] for row in rows]
        packed: list[list[int]] = [[], [], []]
        for row, slot in zip(rows, slots, strict=True):
            length = min(width, row.num_to_feed)
            padding = [0] * (width - length)
            packed[0] += row.ids[row.fed : row.fed + length] + padding
            packed[1] += [*range(row.fed, row.fed + length), *padding]
            packed[2] += [slot] * length + [cache.nowhere] * (width - length)
        ends = [min(row.fed + width, len(row.ids) - 1) for row in rows]
        self.decoder.feed(
            cache, self.to_tensor(packed), self.numbers_T[: max(ends)], append_A=self.to_tensor(slots),
            width_W=self.numbers_T[:width], num_rows=len(self.rows.live),
        )  # fmt: skip
        for row, end in zip(rows, ends, strict=True):
            row.fed = end
