"""The in-process engine: continuous batching over the Hugging Face model's own forward, KV kept across turns.

Every step samples one token for all live episodes, in one packed row that also feeds what tools have answered since; a
long reply (and every prompt) has a forward of its own, and each token is computed once. Prompts shared by a group are
prefilled once. Sampling is by inverse CDF with one uniform number a token from the turn's own stream, so batch size,
concurrency and arrival order change no episode's random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tasks.attention import StepPlan
from tasks.rollouts.chat import ChatFormat
from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest, never
from tasks.rollouts.probe import model_logp
from tasks.rollouts.ragged_cache import RaggedCache
from tasks.rollouts.seeds import uniforms

LONG_APPEND = 24  # tokens; a longer append gets a forward of its own, or all others would be padded to it


@dataclass(slots=True)
class _Row:
    """What one live slot is doing. `fed` tokens are in the cache, and `feed` waits to be fed by the next step."""

    episode: EpisodeHandle
    fed: int
    feed: list[int]
    noise: list[float]
    token_ids: list[int]
    sampler_logp: list[float]
    is_waiting: bool


class TransformersEngine:
    """Generates with a model that the caller owns, and may train between polls (see `policy_version`).

    `end_of_turn` is the id that completes a turn, as `stop` may; `max_context` bounds an episode's tokens and sizes the
    cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_of_turn: int,
        temperature: float,
        top_p: float,
        stop: StopStrings | None,
        max_context: int,
        max_concurrent_episodes: int,
        policy_version: int = 0,
    ):
        self.model, self.policy_version = model, policy_version
        # In the place of a mask, which the plan of a step stands for; a model that dropped the plan would be all NaN.
        self.no_mask = torch.full((1, 1, 1, 1), float("nan"), device=model.device)
        self.end_of_turn, self.temperature, self.top_p, self.stop = end_of_turn, temperature, top_p, stop
        self.cache = RaggedCache(model.config.num_hidden_layers, max_concurrent_episodes, max_context)
        self.rows: list[_Row] = []
        self.slot: dict[EpisodeHandle, int] = {}
        self.opening: list[TurnRequest] = []

    def submit(self, request: TurnRequest) -> None:
        if request.episode not in self.slot:
            self.opening.append(request)
            return
        row = self.rows[self.slot[request.episode]]
        self._begin_turn(row, request, feed=[*row.feed, *request.token_ids])

    def release(self, episode: EpisodeHandle) -> None:
        slot, last = self.slot.pop(episode), len(self.rows) - 1
        row = self.rows.pop()
        if slot != last:
            self.cache.move(last, slot, row.fed)
            self.rows[slot] = row
            self.slot[row.episode] = slot

    def refresh(self, model: PreTrainedModel, policy_version: int) -> None:
        """The model is the caller's own, so that its weights are here already."""
        assert model is self.model
        self.policy_version = policy_version

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return model_logp(self.model, sequences)

    def sleep(self) -> None:
        """The model is the trainer's own; there is nothing to give back."""

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held beyond this object."""

    @torch.no_grad()
    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        self._open_episodes()
        self._feed_long_appends()
        num_live = self._gather_live_rows()
        replies: list[TurnReply] = []
        while num_live and not replies and not until():
            replies = self._step(self.rows[:num_live])
        return replies

    def _begin_turn(self, row: _Row, request: TurnRequest, *, feed: list[int]) -> None:
        row.feed, row.is_waiting = feed, False
        row.noise = uniforms(request.seed, request.max_new_tokens).tolist()
        row.token_ids, row.sampler_logp = [], []

    def _open_episodes(self) -> None:
        """Prefill each distinct new prompt once, all but its last token, and give every new episode a slot."""
        if not self.opening:
            return
        prompts = list(dict.fromkeys(tuple(request.token_ids) for request in self.opening))
        prefilled = self._prefill(prompts) if max(map(len, prompts)) > 1 else None
        index = {prompt: number for number, prompt in enumerate(prompts)}
        for request in self.opening:
            slot, prompt = len(self.rows), tuple(request.token_ids)
            fed = len(prompt) - 1
            if prefilled is not None:
                self.cache.fill(slot, prefilled, index[prompt], fed)
            row = _Row(request.episode, fed, [], [], [], [], is_waiting=False)
            self._begin_turn(row, request, feed=[prompt[-1]])
            self.rows.append(row)
            self.slot[request.episode] = slot
        self.opening.clear()

    def _prefill(self, prompts: list[tuple[int, ...]]) -> DynamicCache:
        """Right-padded causal forward: what a padded position computes lies behind its row's length and is never
        read.
        """
        width = max(map(len, prompts)) - 1
        ids = torch.tensor(
            [[*prompt[:-1], *[0] * (width + 1 - len(prompt))] for prompt in prompts], device=self.model.device
        )
        cache = DynamicCache()
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _feed_long_appends(self) -> None:
        for slot, row in enumerate(self.rows):
            if not row.is_waiting and len(row.feed) - 1 > LONG_APPEND:
                self._forward([(slot, row)], [])
                row.fed, row.feed = row.fed + len(row.feed) - 1, row.feed[-1:]

    def _gather_live_rows(self) -> int:
        """Put the rows that have a turn under way in front of those that wait for the caller; how many there are."""
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

    def _step(self, rows: list[_Row]) -> list[TurnReply]:
        """Feed every live row what waits for it, and sample its next token."""
        logits = self._forward([(slot, row) for slot, row in enumerate(rows) if len(row.feed) > 1], rows)
        for row in rows:
            row.fed += len(row.feed)
        return self._sample(rows, logits)

    def _forward(self, appends: list[tuple[int, _Row]], rows: list[_Row]) -> Tensor:
        """One packed row: of `appends` all tokens but the last, padded to the longest, then the last token of each of
        `rows`, whose logits it returns. A position is an id, its place in the row and its slot.
        """
        width = max((len(row.feed) - 1 for _, row in appends), default=0)
        filler = (0, 0, self.cache.nowhere)
        packed: list[tuple[int, int, int]] = []
        for slot, row in appends:
            packed += zip(row.feed[:-1], range(row.fed, self.cache.capacity), [slot] * width, strict=False)
            packed += [filler] * (width - len(row.feed) + 1)
        packed += [(row.feed[-1], row.fed + len(row.feed) - 1, slot) for slot, row in enumerate(rows)]
        ids_P, position_P, slot_P = torch.tensor(packed, device=self.model.device).unbind(1)
        append_length = max((row.fed + len(row.feed) - 1 for _, row in appends), default=0)
        length = max((row.fed + len(row.feed) for row in rows), default=append_length)
        plan = StepPlan(
            position_P, append_rows=[slot for slot, _ in appends], append_length=append_length, width=width,
            num_rows=len(rows), length=length, dtype=self.model.dtype,
        )  # fmt: skip
        num_slots = len(rows) or len(self.rows)
        output = self.model(
            input_ids=ids_P[None],
            attention_mask=self.no_mask,
            position_ids=position_P[None],
            past_key_values=self.cache.at(slot_P, position_P, rows=slice(0, num_slots), length=length),
            use_cache=True,
            logits_to_keep=len(rows) or 1,
            plan=plan,
        )
        return output.logits[0]

    def _sample(self, rows: list[_Row], logits_NV: Tensor) -> list[TurnReply]:
        numbers = [row.noise[len(row.token_ids)] for row in rows]
        noise = torch.tensor(numbers, dtype=torch.float64, device=logits_NV.device)
        tokens, logps = sample_tokens(logits_NV, noise, temperature=self.temperature, top_p=self.top_p)
        replies = []
        for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
            row.token_ids.append(token)
            row.sampler_logp.append(logp)
            row.feed = [token]
            if finish := self._finish(row):
                row.is_waiting = True
                replies.append(TurnReply(row.episode, row.token_ids, row.sampler_logp, finish, self.policy_version))
        return replies

    def _finish(self, row: _Row) -> Finish | None:
        """What the row's newest token ends the turn by; None where the turn goes on."""
        if row.token_ids[-1] == self.end_of_turn:
            return "end_of_turn"
        if self.stop is not None and self.stop.found(row.token_ids):
            return "stop_string"
        return "length" if len(row.token_ids) == len(row.noise) else None


class StopStrings:
    """Finds out whether a turn's newest token completes one of the strings, from its last few tokens alone.

    A token is at least one byte of text, so a string of B bytes lies within the last B tokens; some more keep a
    tokenizer that treats the first token of a text differently from cutting into it.
    """

    SPARE_TOKENS = 8

    def __init__(self, strings: Sequence[str], chat: ChatFormat):
        self.strings, self.chat = strings, chat
        self.num_tokens = max(len(text.encode()) for text in strings) + self.SPARE_TOKENS

    def found(self, token_ids: list[int]) -> bool:
        """Whether the text of the turn so far holds a stop string; to be asked after each token."""
        text = self.chat.decode(token_ids[-self.num_tokens :])
        return any(string in text for string in self.strings)


def sample_tokens(logits_NV: Tensor, noise_N: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF: ids [N] and their log-probs [N] under the distribution actually sampled from.

    `noise_N` is uniform in [0, 1). The log-prob is after temperature and top-p (the smallest set of tokens whose
    probability reaches `top_p`, renormalised), as importance ratios need it.
    """
    logits_NV = logits_NV.float()
    logp_NV = torch.log_softmax(logits_NV if temperature == 1 else logits_NV / temperature, dim=-1)
    if top_p < 1:
        sorted_logp, order = logp_NV.sort(dim=-1, descending=True)
        probability = sorted_logp.exp()
        is_cut = probability.cumsum(-1) - probability >= top_p
        logp_NV = logp_NV.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), float("-inf"))
        logp_NV = torch.log_softmax(logp_NV, dim=-1)
    cdf_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf_NV, noise_N.double()[:, None] * cdf_NV[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits_NV.shape[-1] - 1)
    return tokens[:, 0], logp_NV.gather(-1, tokens)[:, 0]
