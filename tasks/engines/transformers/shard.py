"""A shard of the in-process engine: its share of the live episodes, with a cache of its own.

Every step samples one token for each live episode, in one packed row that also feeds new tool replies; a long reply and
every prompt have a forward of their own. A group's common prompt is prefilled once. Shards share only the model, so
each may step in its own thread. Requests wait until the shard's next step, so the caller's thread never touches a step
under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import Decoder, Step
from tasks.engines.transformers.ragged_cache import RaggedCache
from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest
from tasks.rollouts.sampling import StopStrings
from tasks.rollouts.seeds import uniforms

LONG_APPEND = 24  # tokens; a longer append gets its own forward, or all others would be padded to it


@dataclass(slots=True)
class _Row:
    """The state of one live slot. `fed` tokens are in the cache; the next step feeds `feed`."""

    episode: EpisodeHandle
    end_ids: frozenset[int]
    fed: int
    feed: list[int]
    noise: list[float]
    token_ids: list[int]
    sampler_logp: list[float]
    is_waiting: bool


class EngineShard:
    """Any of `end_ids`, one of the request's own or `stop` completes a turn; `max_context` bounds its episode."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        end_ids: tuple[int, ...],
        stop: StopStrings | None,
        max_context: int,
        max_episodes: int,
    ):
        self.decoder, self.end_ids, self.stop = decoder, frozenset(end_ids), stop
        self.cache = RaggedCache(decoder.model.config.num_hidden_layers, max_episodes, max_context)
        self.numbers = torch.arange((max_context + 1) * (max_episodes + 1), device=decoder.model.device)
        self.counts: dict[tuple[int, int], Tensor] = {}
        self.is_on_cpu = decoder.model.device.type == "cpu"
        self.rows: list[_Row] = []
        self.slot: dict[EpisodeHandle, int] = {}

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    @torch.no_grad()
    def advance(self, requests: Sequence[TurnRequest | EpisodeHandle], policy_version: int) -> list[TurnReply]:
        """Process the requests in order, then take one step for every episode with a turn under way; the turns it
        completes.
        """
        opening: list[TurnRequest] = []
        for request in requests:
            if not isinstance(request, TurnRequest):
                self._release(request)
            elif request.episode in self.slot:
                row = self.rows[self.slot[request.episode]]
                self._begin_turn(row, request, feed=[*row.feed, *request.token_ids])
            else:
                opening.append(request)
        self._open_episodes(opening)
        self._feed_long_appends()
        num_live = self._gather_live_rows()
        return self._step(self.rows[:num_live], policy_version) if num_live else []

    def _release(self, episode: EpisodeHandle) -> None:
        slot, last = self.slot.pop(episode), len(self.rows) - 1
        row = self.rows.pop()
        if slot != last:
            self.cache.move(last, slot, row.fed)
            self.rows[slot] = row
            self.slot[row.episode] = slot

    def _begin_turn(self, row: _Row, request: TurnRequest, *, feed: list[int]) -> None:
        row.feed, row.is_waiting = feed, False
        row.end_ids = self.end_ids.union(request.end_ids)
        row.noise = uniforms(request.seed, request.max_new_tokens).tolist()
        row.token_ids, row.sampler_logp = [], []

    def _open_episodes(self, opening: Sequence[TurnRequest]) -> None:
        if not opening:
            return
        prompts = list(dict.fromkeys(tuple(request.token_ids) for request in opening))
        prefilled = self._prefill(prompts) if max(map(len, prompts)) > 1 else None
        index = {prompt: number for number, prompt in enumerate(prompts)}
        for request in opening:
            slot, prompt = len(self.rows), tuple(request.token_ids)
            fed = len(prompt) - 1
            if prefilled is not None:
                self.cache.fill(slot, prefilled, index[prompt], fed)
            row = _Row(request.episode, self.end_ids, fed, [], [], [], [], is_waiting=False)
            self._begin_turn(row, request, feed=[prompt[-1]])
            self.rows.append(row)
            self.slot[request.episode] = slot

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Right-padded causal forward: padded positions are beyond their row's length and never read."""
        width = max(map(len, prompts)) - 1
        ids = torch.tensor(
            [[*prompt[:-1], *[0] * (width + 1 - len(prompt))] for prompt in prompts], device=self.model.device
        )
        return self.decoder.prefill(ids, self.numbers[:width])

    def _feed_long_appends(self) -> None:
        for slot, row in enumerate(self.rows):
            length = len(row.feed) - 1
            if not row.is_waiting and length > LONG_APPEND:
                packed = [row.feed[:-1], list(range(row.fed, row.fed + length)), [slot] * length]
                self.decoder.feed(
                    self.cache, self._tensor(packed), self.numbers[: row.fed + length], self.numbers[:length],
                    num_rows=len(self.rows),
                )  # fmt: skip
                row.fed, row.feed = row.fed + length, row.feed[-1:]

    def _gather_live_rows(self) -> int:
        live, last = 0, len(self.rows) - 1
        while live <= last:
            if not self.rows[live].is_waiting:
                live += 1
            elif self.rows[last].is_waiting:
                last -= 1
            else:
                one, other = self.rows[live], self.rows[last]
                self.cache.swap(live, last, max(one.fed, other.fed))
                self.rows[live], self.rows[last] = other, one
                self.slot[other.episode], self.slot[one.episode] = live, last
        return live

    def _step(self, rows: list[_Row], policy_version: int) -> list[TurnReply]:
        tokens, logps = self.decoder.step(self.cache, self._packed(rows))
        replies = []
        for row, token, logp in zip(rows, tokens.cpu().numpy().tolist(), logps.cpu().numpy().tolist(), strict=True):
            row.fed += len(row.feed)
            row.token_ids.append(token)
            row.sampler_logp.append(logp)
            row.feed = [token]
            if finish := self._finish(row):
                row.is_waiting = True
                replies.append(TurnReply(row.episode, row.token_ids, row.sampler_logp, finish, policy_version))
        return replies

    def _packed(self, rows: list[_Row]) -> Step:
        appends = [(slot, row) for slot, row in enumerate(rows) if len(row.feed) > 1]
        width = max((len(row.feed) - 1 for _, row in appends), default=0)
        ids: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for slot, row in appends:
            length = len(row.feed) - 1
            padding = [0] * (width - length)
            ids += row.feed[:-1] + padding
            places += [*range(row.fed, row.fed + length), *padding]
            slots += [slot] * length + [self.cache.nowhere] * (width - length)
        lengths = [row.fed + len(row.feed) for row in rows]
        ids += [row.feed[-1] for row in rows]
        places += [length - 1 for length in lengths]
        slots += range(len(rows))
        noise = [row.noise[len(row.token_ids)] for row in rows]
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

    def _count(self, start: int, end: int) -> Tensor:
        """start … end − 1, cached: a slice hands Python's lock over too."""
        if (start, end) not in self.counts:
            self.counts[start, end] = self.numbers[start:end]
        return self.counts[start, end]

    def _finish(self, row: _Row) -> Finish | None:
        if row.token_ids[-1] in row.end_ids:
            return "end_of_turn"
        if self.stop is not None and self.stop.found(row.token_ids):
            return "stop_string"
        return "length" if len(row.token_ids) == len(row.noise) else None
