"""The in-process engine: continuous batching over the Hugging Face model's own forward, KV kept across turns.

Each token uses one uniform number from its turn's own stream, so batch size, concurrency and arrival order change no
episode's random numbers. On CPU two shards (`shard.py`) divide a small model's episodes, each in a thread with half of
torch's threads: its matrices are too small to share. Which episodes share a step does not depend on a shard's speed: a
new episode goes to the shard with the fewest, shards reply in turn, and a shard steps again once the caller took its
replies. Only answers of slow tools change that. Threads of C (`shard_in_c.py`) run ahead: they read while others are
submitted, and step on while the caller reads replies, as no bit depends on who shares a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tasks.chat.format import ChatFormat
from tasks.engines.transformers.check import check_architecture
from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.memory import check_budget, forward_limits, position_bytes, smallest_cache
from tasks.engines.transformers.settings import kv_cache_bytes
from tasks.engines.transformers.shard import EngineShard, Shard
from tasks.engines.transformers.shard_in_c import ShardInC
from tasks.engines.transformers.step_in_c import StepInC
from tasks.models.architecture import model_logp
from tasks.models.folders import load_config, load_model
from tasks.models.limits import check_playable
from tasks.models.policy_weights import AdapterShape, PolicyWeights
from tasks.models.settings import ComputeSettings
from tasks.models.torch_setup import free_unused, is_small, start_threads
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest, never
from tasks.rollouts.sampling import StopStrings
from tasks.rollouts.settings import EngineSettings, SamplingSettings

NUM_SHARDS = 2
NUM_READ_AHEAD = 8  # requests that an idle shard reads before the next poll, while their caller prepares others
MAX_BYTES_IN_SHARDS = 32 << 20  # of weights, which each shard reads: cheap while they fit a cache


class TransformersEngine:
    """Generates with a model that the caller owns, and may train between polls where no turn is under way, or once it
    has called `pause` (see `policy_version`).

    Any of `end_ids`, one of the request's own or `stop` completes a turn; `max_context` bounds an episode's tokens,
    `kv_cache_bytes` the cache (None: all of `max_concurrent_episodes` have room). `num_threads` are torch's, over all
    shards. ValueError where the engine would not compute the model's distribution, or the cache fits no episode.
    """

    has_own_memory, knows_its_weights = False, True
    remedy = "Set engine.name: vllm"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_ids: tuple[int, ...],
        temperature: float,
        top_p: float,
        stop: StopStrings | None,
        max_context: int,
        max_concurrent_episodes: int,
        kv_cache_bytes: int | None,
        num_threads: int,
    ):
        runs_in_c = check_architecture(model, max_tokens=max_context)
        self.model, self.policy_version = model, 0
        cached = position_bytes(model)
        check_budget(kv_cache_bytes, max_context=max_context, cached=cached)
        is_shared = kv_cache_bytes is None or kv_cache_bytes // NUM_SHARDS >= smallest_cache(max_context, cached)
        num_shards = (
            NUM_SHARDS if num_threads >= NUM_SHARDS and is_shared and is_small(model, MAX_BYTES_IN_SHARDS) else 1
        )
        max_episodes = -(-max_concurrent_episodes // num_shards)
        all_positions = (max_episodes + 1) * max_context
        limits: dict[str, Any] = {
            "end_ids": end_ids,
            "stop": stop,
            "max_context": max_context,
            "max_positions": all_positions if kv_cache_bytes is None else kv_cache_bytes // num_shards // cached,
        }
        self.decoder: Decoder | StepInC
        self.shards: list[Shard]
        self.threads: list[ThreadPoolExecutor] = []
        self.runs_ahead = False  # steps on while the caller reads replies
        if runs_in_c:
            step = StepInC(model, max_context=max_context, temperature=temperature, top_p=top_p)
            self.decoder = step
            self.shards = [ShardInC(step, has_thread=num_shards > 1, **limits) for _ in range(num_shards)]
            self.runs_ahead = num_shards > 1
        else:
            decoder = Decoder(model, temperature=temperature, top_p=top_p)
            self.decoder = decoder
            limits |= {"max_episodes": max_episodes, "limits": forward_limits(model, cached=cached)}
            self.shards = [EngineShard(decoder, **limits) for _ in range(num_shards)]
            if num_shards > 1:
                self.threads = start_threads(num_shards, num_threads // num_shards, name="shard")
        self.shard_of: dict[EpisodeHandle, int] = {}
        self.num_episodes, self.num_turns = [0] * num_shards, [0] * num_shards
        self.requests: list[list[TurnRequest | EpisodeHandle]] = [[] for _ in self.shards]
        self.under_way: deque[tuple[int, Callable[[], list[TurnReply]]]] = deque()
        self.replies: list[TurnReply] = []  # of steps that were completed by `pause`

    def set_distribution(self, *, temperature: float, top_p: float) -> None:
        """Of all turns from now on; no turn may be under way."""
        self.decoder.set_distribution(temperature=temperature, top_p=top_p)

    def submit(self, request: TurnRequest) -> None:
        shard = self.shard_of.get(request.episode)
        if shard is None:
            shard = self.shard_of[request.episode] = self.num_episodes.index(min(self.num_episodes))
            self.num_episodes[shard] += 1
        self.num_turns[shard] += 1
        self.requests[shard].append(request)
        if self.runs_ahead and len(self.requests[shard]) >= NUM_READ_AHEAD and shard in self._idle():
            self._begin_steps()
            self._start(shard, is_read_only=True)

    def release(self, episode: EpisodeHandle) -> None:
        shard = self.shard_of.pop(episode)
        self.num_episodes[shard] -= 1
        self.requests[shard].append(episode)

    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        assert weights.model is self.model
        self.pause()
        self.policy_version = policy_version
        self.decoder.take_weights(have_changed=True)
        for shard, released in self._released():
            shard.forget(released)

    def pause(self) -> None:
        while self.under_way:
            self.replies += self._complete_step()[1]

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return model_logp(self.model, sequences)

    def sleep(self) -> None:
        """Gives the cache back; the model is the trainer's own."""
        assert not any(self.num_turns)
        for shard, released in self._released():
            shard.sleep(released)
        free_unused(self.model.device)

    def counts(self) -> dict[str, float]:
        """What episodes that left the cache for want of room cost."""
        num_recomputed = sum(shard.rows.num_recomputed for shard in self.shards)
        return {"recomputed_tokens": num_recomputed} if num_recomputed else {}

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()
        for shard in self.shards:
            shard.close()

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        """The replies of the next shard in turn; meanwhile each shard computes its next step."""
        if self.replies:
            replies, self.replies = self.replies, []
            return replies
        self._begin_steps()
        for shard in self._idle():
            self._start(shard)
        while self.under_way and not until():
            shard, replies = self._complete_step()
            if self.runs_ahead or not replies:
                self._start(shard)
            if replies:
                return replies
        return []

    def _begin_steps(self) -> None:
        if not self.under_way:
            self.decoder.take_weights()

    def _idle(self) -> list[int]:
        busy = {shard for shard, _ in self.under_way}
        return [shard for shard in range(len(self.shards)) if shard not in busy]

    def _complete_step(self) -> tuple[int, list[TurnReply]]:
        shard, result = self.under_way.popleft()
        replies = result()
        self.num_turns[shard] -= len(replies)
        return shard, replies

    def _released(self) -> list[tuple[Shard, list[EpisodeHandle]]]:
        """Each shard with the releases it has not seen; no step is under way. Turns it has not seen it will."""
        released = [[item for item in requests if isinstance(item, EpisodeHandle)] for requests in self.requests]
        self.requests = [[item for item in requests if isinstance(item, TurnRequest)] for requests in self.requests]
        return list(zip(self.shards, released, strict=True))

    def _start(self, shard: int, *, is_read_only: bool = False) -> None:
        if not self.num_turns[shard]:
            return
        requests, self.requests[shard] = self.requests[shard], []
        finish = self.shards[shard].start(requests, self.policy_version, is_read_only=is_read_only)
        self.under_way.append((shard, self.threads[shard].submit(finish).result if self.threads else finish))


def load_engine(
    folder: Path,
    chat: ChatFormat,
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    compute: ComputeSettings,
    model: PreTrainedModel | None,
    lora: AdapterShape | None,
) -> TransformersEngine:
    if model is None:
        check_playable(load_config(folder), max_tokens=sampling.max_tokens_per_episode)
    return TransformersEngine(
        model if model is not None else load_model(folder, compute=compute),
        end_ids=chat.end_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=StopStrings(sampling.stop_strings, chat) if sampling.stop_strings else None,
        max_context=sampling.max_tokens_per_episode,
        max_concurrent_episodes=engine.max_concurrent_episodes,
        kv_cache_bytes=kv_cache_bytes(engine),
        num_threads=compute.num_threads,
    )
