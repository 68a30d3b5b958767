"""A shard of the in-process engine: its share of the live episodes, with a cache of its own.

Every step samples one token for each live episode, in one packed row that also feeds short tool replies; prompts and
long replies have forwards of their own (`reading.py`). Shards share only the model, so each may step in its own thread.
Requests wait until the shard's next step, so the caller's thread never touches a step under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import Decoder, Step
from tasks.engines.transformers.memory import ForwardLimits
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.engines.transformers.reading import Reader
from tasks.engines.transformers.rows import Row, Rows
from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest
from tasks.rollouts.sampling import StopStrings
from tasks.rollouts.seeds import uniforms


class Shard:
    """The rows of a shard and what completes their turns: any of `end_ids`, one of the request's own or `stop`;
    `max_context` bounds an episode, `max_positions` the cache.
    """

    def __init__(
        self,
        cache: RaggedCache,
        *,
        end_ids: tuple[int, ...],
        stop: StopStrings | None,
        max_context: int,
        max_positions: int,
    ):
        self.end_ids, self.stop = frozenset(end_ids), stop
        self.cache = cache
        self.rows = Rows(self.cache, max_positions=max_positions, max_context=max_context)

    def start(
        self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int, *, is_read_only: bool = False
    ) -> Callable[[], list[TurnReply]]:
        """Process the requests in order, then take a step, or some, for every episode with a turn under way and room in
        the cache, unless `is_read_only`; a function that waits for it and returns the turns it completes.
        """
        raise NotImplementedError

    def forget(self, released: Sequence[EpisodeHandle]) -> None:
        """Release these, and compute anew what the others need when they step next, in a turn under way or a later
        one.
        """
        for episode in released:
            self.rows.release(episode)
        for row in [*self.rows.live]:
            self.rows.drop(row)

    def sleep(self, released: Sequence[EpisodeHandle]) -> None:
        self.forget(released)
        self.cache.free()

    def close(self) -> None:
        """It steps no more."""

    def _process(self, requests: Sequence[TurnRequest | EpisodeHandle]) -> list[Row]:
        """The rows that entered the cache, last of its live ones."""
        for request in requests:
            if isinstance(request, TurnRequest):
                self._begin_turn(request)
            else:
                self.rows.release(request)
        return self.rows.make_room() if requests or self.rows.waiting else []

    def _begin_turn(self, request: TurnRequest) -> Row:
        row = self.rows.known.get(request.episode)
        if row is None:
            row = self.rows.open(request)
        else:
            row.ids += request.token_ids
        row.begin_turn(request, self.end_ids)
        return row

    def _completed(self, rows: Sequence[Row]) -> list[TurnReply]:
        """The turns that their newest token completes."""
        replies = []
        for row in rows:
            if finish := self._finish(row):
                row.end_turn()
                replies.append(TurnReply(row.episode, row.token_ids, row.sampler_logp, finish, row.token_versions))
        return replies

    def _finish(self, row: Row) -> Finish | None:
        if row.token_ids[-1] in row.end_ids:
            return "end_of_turn"
        if self.stop is not None and self.stop.found(row.token_ids):
            return "stop_string"
        return "length" if len(row.token_ids) == row.room else None


class EngineShard(Shard):
    """One that steps by the model's own forward; `limits` bounds each forward over new text."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        end_ids: tuple[int, ...],
        stop: StopStrings | None,
        max_context: int,
        max_episodes: int,
        max_positions: int,
        limits: ForwardLimits,
    ):
        super().__init__(
            RaggedCache(decoder.model.config.get_text_config().num_hidden_layers, 0, 0),
            end_ids=end_ids,
            stop=stop,
            max_context=max_context,
            max_positions=max_positions,
        )
        self.decoder = decoder
        self.is_on_cpu = decoder.model.device.type == "cpu"
        most = max(max_context, (limits.in_step + 1) * max_episodes)  # positions of a row, or of a step
        self.numbers = torch.arange(most + 1, device=decoder.model.device)
        self.counts: dict[tuple[int, int], Tensor] = {}
        self.noise: dict[EpisodeHandle, list[float]] = {}  # of the turns under way
        self.reader = Reader(decoder, self.rows, limits, numbers_T=self.numbers, to_tensor=self._tensor)

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    def start(
        self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int, *, is_read_only: bool = False
    ) -> Callable[[], list[TurnReply]]:
        """All of it in the thread that calls the function."""
        assert not is_read_only
        return partial(self.advance, requests, policy_version)

    @torch.no_grad()
    def advance(self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int) -> list[TurnReply]:
        self.reader.read(self._process(requests))
        rows = self.rows.live[: self.rows.gather()]
        if not rows:
            return []
        tokens, logps = self._numbers(*self.decoder.step(self.cache, self._packed(rows)))
        for row, token, logp in zip(rows, tokens, logps, strict=True):
            row.fed = len(row.ids)
            row.ids.append(token)
            row.token_ids.append(token)
            row.sampler_logp.append(logp)
            row.token_versions.append(policy_version)
        replies = self._completed(rows)
        for reply in replies:
            del self.noise[reply.episode]
        return replies

    def _begin_turn(self, request: TurnRequest) -> Row:
        self.noise[request.episode] = uniforms(request.seed, request.max_new_tokens).tolist()
        return super()._begin_turn(request)

    def _packed(self, rows: list[Row]) -> Step:
        appends = [(slot, row) for slot, row in enumerate(rows) if len(row.ids) - row.fed > 1]
        width = max((row.num_to_feed for _, row in appends), default=0)
        ids: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for slot, row in appends:
            length = row.num_to_feed
            padding = [0] * (width - length)
            ids += row.ids[row.fed : -1] + padding
            places += [*range(row.fed, row.fed + length), *padding]
            slots += [slot] * length + [self.cache.nowhere] * (width - length)
        lengths = [len(row.ids) for row in rows]
        ids += [row.ids[-1] for row in rows]
        places += [length - 1 for length in lengths]
        slots += range(len(rows))
        noise = [self.noise[row.episode][len(row.token_ids)] for row in rows]
        return Step(
            packed_3P=self._tensor([ids, places, slots]),
            last_N=self._count(len(ids) - len(rows), len(ids)),
            span_T=self._count(0, max(lengths)),
            noise_N=self._tensor(noise),
            append_A=self._tensor([slot for slot, _ in appends]) if appends else None,
            width_W=self._count(0, width) if appends else None,
        )

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]] | Sequence[float]) -> Tensor:
        """By NumPy, which keeps Python's lock; torch.tensor would hand it to the other shard and wait for it."""
        tensor = torch.from_numpy(np.array(numbers))
        return tensor if self.is_on_cpu else tensor.to(self.model.device)

    def _numbers(self, tokens: Tensor, logps: Tensor) -> tuple[list[int], list[float]]:
        """From a GPU in one transfer, for which it stops: as float64, in which ids are exact."""
        if self.is_on_cpu:
            return tokens.numpy().tolist(), logps.numpy().tolist()
        ids, logp = torch.stack([tokens.double(), logps.double()]).cpu().numpy()
        return ids.astype(np.int64).tolist(), logp.tolist()

    def _count(self, start: int, end: int) -> Tensor:
        """start … end − 1, cached: a slice hands Python's lock over too."""
        if (start, end) not in self.counts:
            self.counts[start, end] = self.numbers[start:end]
        return self.counts[start, end]
