"""A shard whose steps run in C: no position is padded, no row must be moved beside another, and the caller's thread
prepares what a thread of C computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.engines.transformers.rows import Row, waves
from tasks.engines.transformers.shard import Shard
from tasks.engines.transformers.step_in_c import StepInC, Work, Worker
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest
from tasks.rollouts.sampling import StopStrings


class ShardInC(Shard):
    """`has_thread`: else its steps run in the thread that waits for them."""

    def __init__(
        self,
        step: StepInC,
        *,
        end_ids: tuple[int, ...],
        stop: StopStrings | None,
        max_context: int,
        max_positions: int,
        has_thread: bool,
    ):
        super().__init__(
            step.model.config.num_hidden_layers,
            end_ids=end_ids,
            stop=stop,
            max_context=max_context,
            max_positions=max_positions,
        )
        self.step, self.worker = step, Worker() if has_thread else None

    def start(
        self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int
    ) -> Callable[[], list[TurnReply]]:
        works = self._read(self._process(requests))
        rows = [row for row in self.rows.live if not row.is_waiting]
        works.append(self._sample(rows))
        finish = self.step.start(self.cache, works, self.worker)

        def complete() -> list[TurnReply]:
            tokens, logps = finish()
            return self._append(rows, tokens, logps, policy_version)

        return complete

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _read(self, entered: list[Row]) -> list[Work]:
        """The starts of these rows: those that are others' are copied, once those are computed."""
        sources, works = self.rows.sources(entered), [Work()]
        for ready in waves(entered, sources):
            for row in ready:
                if row.episode in sources:
                    source, length = sources[row.episode]
                    row.fed = min(length, source.fed)
                    works[-1].copies += [self.rows.slot[source.episode], self.rows.slot[row.episode], row.fed]
            for row in ready:
                self._feed(works[-1], row, end=len(row.ids) - 1)
            works.append(Work())
        return works[:-1]

    def _sample(self, rows: Sequence[Row]) -> Work:
        """A token after the last position of each, and all before it that the cache has not."""
        work = Work()
        for row in rows:
            self._feed(work, row, end=len(row.ids))
            work.asked.append(len(work.ids) - 1)
            work.noise.append(row.noise[len(row.token_ids)])
        return work

    def _feed(self, work: Work, row: Row, *, end: int) -> None:
        if row.fed < end:
            work.add(row.ids[row.fed : end], slot=self.rows.slot[row.episode], first=row.fed)
            row.fed = end
