"""A shard whose steps run in C: no position is padded, no row must be moved beside another, and the caller's thread
prepares what a thread of C computes. Python is told of tokens when their turn ends, or before other weights write on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.rows import Row, waves
from tasks.engines.transformers.shard import Shard
from tasks.engines.transformers.step_in_c import Pass, StepInC, Worker
from tasks.engines.transformers.written_turn import WrittenTurn
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest
from tasks.rollouts.sampling import StopStrings

MAX_STEPS = 8  # in a row, while no turn ends: so often an answer of a tool is looked for


class CopyingCache(RaggedCache):
    """Moves are copies for the next job, unless the storage changes before: in torch each takes 30 µs. No position is
    read before it is written, so none is zeroed.
    """

    def __init__(self, num_layers: int, num_slots: int, capacity: int):
        super().__init__(num_layers, num_slots, capacity)
        self.copies: list[int] = []

    def move(self, source: int, target: int, length: int) -> None:
        self.copies += source, target, length

    def storage_like(self, states: Tensor) -> Tensor:
        return states.new_empty(self.num_slots + 1, states.shape[1], self.capacity, states.shape[3])

    def take_copies(self) -> list[int]:
        copies, self.copies = self.copies, []
        return copies

    def resize(self, num_slots: int, capacity: int, *, num_rows: int, length: int) -> None:
        copies = iter(self.take_copies())
        for copy in zip(copies, copies, copies, strict=True):
            super().move(*copy)
        super().resize(num_slots, capacity, num_rows=num_rows, length=length)

    def free(self) -> None:
        self.copies = []
        super().free()


class ShardInC(Shard):
    """`has_thread`: else its steps run in the thread that waits for them."""

    cache: CopyingCache

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
            CopyingCache(step.model.config.num_hidden_layers, 0, 0),
            end_ids=end_ids,
            stop=stop,
            max_context=max_context,
            max_positions=max_positions,
        )
        self.step, self.worker = step, Worker(has_thread=has_thread)
        self.max_steps = MAX_STEPS if stop is None else 1
        self.turns: dict[EpisodeHandle, WrittenTurn] = {}  # under way
        self.ends: dict[frozenset[int], array[int]] = {}
        self.policy_version = 0  # of the job under way or the last one

    def start(
        self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int, *, is_read_only: bool = False
    ) -> Callable[[], list[TurnReply]]:
        self.policy_version = policy_version
        entered = self._process(requests)
        passes = [self._pass([], self.cache.take_copies()), *self._read(entered)]
        rows = [row for row in self.rows.live if not row.is_waiting]
        passes.append(self._pass(rows))
        finish = self.step.start(self.cache, passes, self.worker, max_steps=0 if is_read_only else self.max_steps)

        def complete() -> list[TurnReply]:
            ended = finish()
            for row, turn in zip(rows, passes[-1].turns, strict=True):
                row.fed = turn.row.fed
            have_stop_strings = self.stop is not None and not is_read_only
            last = rows if have_stop_strings else [rows[number] for number in ended]
            for row in last:
                self._take(row)
            replies = self._completed(last)
            for reply in replies:
                del self.turns[reply.episode]
            return replies

        return complete

    def forget(self, released: Sequence[EpisodeHandle]) -> None:
        for episode in self.turns:
            self._take(self.rows.known[episode])
        super().forget(released)

    def close(self) -> None:
        self.worker.close()

    def _begin_turn(self, request: TurnRequest) -> Row:
        self.step.check_ids(request.token_ids)
        row = super()._begin_turn(request)
        if not row.ids or row.room < 1:
            raise ValueError(
                f"a turn begins after {len(row.ids)} tokens and may have {row.room}; both must be 1 or more"
            )
        ends = self.ends.setdefault(row.end_ids, array("q", row.end_ids))
        turn = self.turns[row.episode] = WrittenTurn(row.seed, room=row.room, ends=ends)
        turn.feed(row.ids, fed=row.fed)
        return row

    def _read(self, entered: list[Row]) -> Iterator[Pass]:
        """The starts of these rows: those that are others' are copied, once those are computed."""
        sources = self.rows.sources(entered)
        for ready in waves(entered, sources):
            copies: list[int] = []
            for row in ready:
                self._take(row)
                if row.episode in sources:
                    source, length = sources[row.episode]
                    row.fed = min(length, source.fed)
                    copies += [self.rows.slot[source.episode], self.rows.slot[row.episode], row.fed]
                self.turns[row.episode].feed(row.ids, fed=row.fed)
            for row in ready:
                row.fed = len(row.ids) - 1
            yield self._pass(ready, copies)

    def _pass(self, rows: Sequence[Row], copies: Sequence[int] = ()) -> Pass:
        episodes = [row.episode for row in rows]
        turns, slots = self.turns, self.rows.slot
        return Pass([turns[episode] for episode in episodes], [slots[episode] for episode in episodes], copies)

    def _take(self, row: Row) -> None:
        """What was written of its turn."""
        tokens, logps = self.turns[row.episode].take()
        row.ids += tokens
        row.token_ids += tokens
        row.sampler_logp += logps
        row.token_versions += [self.policy_version] * len(tokens)
