"""Episodes of the in-process engine: those in the cache, and those that wait for room in it.

The cache is a rectangle of slots and positions, since a decode step then reads views and copies nothing. It grows with
the number of its rows and the longest of them, in steps, up to a budget. Every row has room for the turn under way, so
no step needs any. What does not fit waits: the oldest episode is let in first, and where rows outgrow the budget the
youngest leave, to be computed anew later. An episode's tokens never change by it, as its turn's noise is its own.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.rollouts.engine import EpisodeHandle, TurnRequest

STEP = 256  # positions by which the cache grows
PREFIX_BLOCK = 512  # tokens; prompts that share as many at their start are computed once up to there
LENGTH = attrgetter("length")  # of a row


@dataclass(slots=True, eq=False)
class Row:
    """The state of one episode. The cache has the first `fed` of its `ids`; the next step feeds the rest. Its turn may
    have `room` tokens, drawn with numbers of `seed`; `length` is that of the whole episode at the turn's end.
    """

    episode: EpisodeHandle
    age: int
    ids: list[int]
    blocks: list[int]
    fed: int = 0
    is_waiting: bool = True
    end_ids: frozenset[int] = frozenset()
    seed: int = 0
    room: int = 0
    length: int = 0
    token_ids: list[int] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)

    def begin_turn(self, request: TurnRequest, end_ids: frozenset[int]) -> None:
        self.is_waiting, self.end_ids = False, end_ids.union(request.end_ids)
        self.seed, self.room = request.seed, request.max_new_tokens
        self.length = len(self.ids) + self.room
        self.token_ids, self.sampler_logp, self.token_versions = [], [], []

    @property
    def num_to_feed(self) -> int:
        """Beside the last token, with which the next is sampled."""
        return len(self.ids) - self.fed - 1

    def end_turn(self) -> None:
        self.is_waiting, self.length = True, len(self.ids)


def block_hashes(ids: list[int]) -> list[int]:
    """One for each whole block of a prompt, of all up to its end."""
    hashes, before = [], 0
    for end in range(PREFIX_BLOCK, len(ids), PREFIX_BLOCK):
        before = hash((before, *ids[end - PREFIX_BLOCK : end]))
        hashes.append(before)
    return hashes


class Rows:
    """`live[slot]` is in the cache; the turns under way first, once `gather` was called. `waiting` is by age."""

    def __init__(self, cache: RaggedCache, *, max_positions: int, max_context: int):
        self.cache, self.max_positions, self.max_context = cache, max_positions, max_context
        self.live: list[Row] = []
        self.waiting: list[Row] = []
        self.slot: dict[EpisodeHandle, int] = {}
        self.known: dict[EpisodeHandle, Row] = {}
        self.num_opened = self.num_recomputed = 0
        self.size_before = 0, 0  # slots and positions of the storage, also where the cache is without it

    def open(self, request: TurnRequest) -> Row:
        row = Row(request.episode, self.num_opened, list(request.token_ids), block_hashes(request.token_ids))
        self.num_opened += 1
        self.known[request.episode] = row
        self.waiting.append(row)
        return row

    def release(self, episode: EpisodeHandle) -> None:
        row = self.known.pop(episode)
        if episode in self.slot:
            self._remove(row)
        else:
            self.waiting.remove(row)

    def make_room(self) -> list[Row]:
        """Let the youngest leave until all others fit, and the oldest that wait enter; those that entered, in order."""
        while not self._fit(self.live):
            self.leave(max(self.live, key=lambda row: row.age))
        entered = []
        for row in [row for row in self.waiting if not row.is_waiting]:
            if not self._fit([*self.live, row]) and not self._takes_place_of_idle(row):
                break
            self.waiting.remove(row)
            self.slot[row.episode] = len(self.live)
            self.live.append(row)
            entered.append(row)
        return entered

    def leave(self, row: Row) -> None:
        """For want of room; it waits."""
        self.num_recomputed += row.fed
        self.drop(row)

    def drop(self, row: Row) -> None:
        """Its keys and values, to be computed anew."""
        self._remove(row)
        row.fed = 0
        insort(self.waiting, row, key=lambda row: row.age)

    def gather(self) -> int:
        """Move the rows with a turn under way to the front; how many they are."""
        front, last = 0, len(self.live) - 1
        while front <= last:
            if not self.live[front].is_waiting:
                front += 1
            elif self.live[last].is_waiting:
                last -= 1
            else:
                one, other = self.live[front], self.live[last]
                self.cache.swap(front, last, max(one.fed, other.fed))
                self.live[front], self.live[last] = other, one
                self.slot[other.episode], self.slot[one.episode] = front, last
        return front

    def sources(self, entered: list[Row]) -> dict[EpisodeHandle, tuple[Row, int]]:
        """For each of these rows that starts as another does: that one, and how many tokens they share."""
        found, prompts, blocks = {}, dict[tuple[int, ...], Row](), dict[int, Row]()
        for row in self.live[: len(self.live) - len(entered)]:
            for hashed in row.blocks[: row.fed // PREFIX_BLOCK]:
                blocks.setdefault(hashed, row)
        for row in entered:
            prompt = tuple(row.ids)
            if prompt in prompts:
                found[row.episode] = prompts[prompt], len(prompt) - 1
            elif source := self._longest(row, blocks):
                found[row.episode] = source
            prompts.setdefault(prompt, row)
            for hashed in row.blocks:
                blocks.setdefault(hashed, row)
        return found

    def _longest(self, row: Row, blocks: dict[int, Row]) -> tuple[Row, int] | None:
        for number in reversed(range(len(row.blocks))):
            source, length = blocks.get(row.blocks[number]), (number + 1) * PREFIX_BLOCK
            if source is not None and source.ids[:length] == row.ids[:length]:  # equal hashes may be chance
                return source, length
        return None

    def _takes_place_of_idle(self, row: Row) -> bool:
        """Where no turn is under way, as all who have room wait for their tools, the youngest of them leave."""
        if any(not other.is_waiting for other in self.live):
            return False
        while not self._fit([*self.live, row]):
            self.leave(max(self.live, key=lambda row: row.age))
        return True

    def _fit(self, rows: list[Row]) -> bool:
        """Whether the cache has room for these rows, after it has grown where it may."""
        longest = max(map(LENGTH, rows), default=0)
        if len(rows) <= self.cache.num_slots and longest <= self.cache.capacity:
            return True
        capacity = min(self.max_context, -(-longest // STEP) * STEP, self.max_positions // (len(rows) + 1))
        if capacity < longest:
            return False
        num_slots = min(1 << (len(rows) - 1).bit_length(), self.max_positions // capacity - 1)
        if not self.cache.num_slots and num_slots <= self.size_before[0] and capacity <= self.size_before[1]:
            num_slots, capacity = self.size_before  # at once: most plays are like the one before
        self.size_before = num_slots, capacity
        fed = max((row.fed for row in self.live), default=0)
        self.cache.resize(num_slots, capacity, num_rows=len(self.live), length=fed)
        return True

    def _remove(self, row: Row) -> None:
        slot, last = self.slot.pop(row.episode), self.live.pop()
        if last is not row:
            self.cache.move(len(self.live), slot, last.fed)
            self.live[slot] = last
            self.slot[last.episode] = slot


def waves(entered: list[Row], sources: dict[EpisodeHandle, tuple[Row, int]]) -> Iterator[list[Row]]:
    """The rows in an order in which every source is computed before it is read."""
    pending = entered
    while pending:
        missing = {row.episode for row in pending}
        ready = [row for row in pending if row.episode not in sources or sources[row.episode][0].episode not in missing]
        yield ready
        ready_episodes = {row.episode for row in ready}
        pending = [row for row in pending if row.episode not in ready_episodes]
