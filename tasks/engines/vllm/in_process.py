"""vLLM driven by this process: its own loop of requests and steps, one request per turn, token ids both ways.

A turn's prompt is the whole conversation as ids, which vLLM's prefix cache mostly has. The model runs in vLLM's engine
core, another process: on CPU a worker binds its threads to cores and replaces `torch.set_num_threads`. A core that dies
or falls silent is started again, and its turns are repeated with the same seeds. Weights arrive by folder, or by IPC on
a shared GPU; a probe follows each refresh. Turns under way are ended before it and go on after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.engines.vllm.core_process import NotStarted, VLLMCore, core_death, start_core
from tasks.engines.vllm.partial_turn import PartialTurn
from tasks.engines.vllm.requests import prompt_logp, read_finish, score_params, turn_params
from tasks.engines.vllm.settings import WRONG_DTYPE
from tasks.engines.vllm.shared import Start
from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import EpisodeHandle, TurnReply, TurnRequest, never

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

CLOSED = "the engine is closed"
PROBE = "probe "  # begins the names of requests that are no turns
HALF_APPLIED = "half applied"  # what vLLM calls its weights while a refresh is under way


class VLLMEngine:
    """With `lora` a refresh sends the adapter alone."""

    has_own_memory = knows_its_weights = True
    remedy = WRONG_DTYPE

    def __init__(self, start: Start):
        self.options, self.settings, self.lora = start.options, start.settings, start.lora
        self.chat, self.sampling, self.policy_version = start.chat, start.sampling, 0
        self.conversation: dict[EpisodeHandle, list[int]] = {}
        self.under_way: dict[str, PartialTurn] = {}
        self.replies: list[TurnReply] = []  # not polled yet
        self.num_requests = self.num_restarts = self.num_retried_turns = self.num_continued_turns = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.is_asleep = self.is_closed = self.is_refreshing = False
        self.has_first_weights = True
        self.adapter: Path | None = None
        self.weights = start.weights_folder()
        try:
            self.served = self.weights.open_model(start.folder)
            self.core = self._start()
            try:
                self.core.label(str(self.policy_version))
            except self.dead as death:
                self._restart(death)
        except BaseException:
            self.weights.close()
            raise

    def submit(self, request: TurnRequest) -> None:
        assert not self.is_asleep, "refresh wakes the engine"
        self.conversation.setdefault(request.episode, []).extend(request.token_ids)
        name = str(self.num_requests)
        self.num_requests += 1
        self.under_way[name] = PartialTurn(request)
        try:
            self._ask(name)
        except self.dead as death:
            self._restart(death)

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        while self.under_way and not self.replies and not until():
            for output in self._finished():
                self._take(output)
        replies, self.replies = self.replies, []
        return replies

    def release(self, episode: EpisodeHandle) -> None:
        del self.conversation[episode]

    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        """A repeated version costs nothing. Meanwhile vLLM's label is no version, so an interrupted refresh is
        noticed. Turns under way are ended with what they have, and go on with the new weights.
        """
        if policy_version == self.policy_version and not self.is_asleep:
            return
        self.is_refreshing = True
        self._end_turns()
        while not self._try_apply(weights, policy_version):
            pass
        self.is_refreshing = False
        self._go_on()

    def _end_turns(self) -> None:
        """What a dying vLLM does not give back it has not written."""
        left = set(self.under_way)
        try:
            if left:
                self.core.pause()
            while left:
                for output in self.core.step():
                    left.discard(output.request_id)
                    self._take(output)
        except self.dead as death:
            self._restart(death)

    def _go_on(self) -> None:
        try:
            self.core.resume()
            for name in self.under_way:
                self._ask(name)
        except self.dead as death:
            self._restart(death)

    def _try_apply(self, weights: PolicyWeights, policy_version: int) -> bool:
        """False where vLLM died: a new core is up, and the refresh is to be repeated."""
        try:
            self._apply(weights, policy_version)
        except self.dead as death:
            self._restart(death)
            return False
        return True

    def _apply(self, weights: PolicyWeights, policy_version: int) -> None:
        """Each call to vLLM is awaited separately: the time of an export does not count as vLLM's silence.

        A sleeping vLLM gets memory for its weights first, and for its KV cache when they have arrived, by which time
        the trainer has freed what it needed to send them.
        """
        if self.is_asleep:
            self.core.wake("weights")
        self.core.label(HALF_APPLIED)
        self._send(weights, policy_version)
        if self.is_asleep:
            self.core.wake("kv_cache")
            self.is_asleep = False
        if not self.core.empty_prefix_cache():
            raise ValueError(
                f"vLLM would not empty its prefix cache after the refresh to policy version {policy_version}, so new "
                f"turns would use what old weights computed. Start the run again; it continues from its checkpoint."
            )
        self.core.label(str(policy_version))
        self.policy_version = policy_version

    def _send(self, weights: PolicyWeights, policy_version: int) -> None:
        """The adapter alone where vLLM has the weights it belongs to, else all tensors."""
        if self._takes_adapters and weights.save_adapter is not None:
            self.adapter = self.weights.export_adapter(weights.save_adapter, policy_version)
            self.core.load_adapter(self.adapter)
            return
        self.has_first_weights, self.adapter = False, None
        if self.options.transfer == "ipc":
            self.core.take_by_ipc(weights, self.weights.dtype)
        else:
            self.served = self.weights.export(weights, policy_version)
            self.core.load(self.served)

    @property
    def _takes_adapters(self) -> bool:
        return self.lora is not None and self.has_first_weights

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Prompt log-probs, which vLLM gives before temperature and top-p and never takes from the prefix cache."""
        outputs: dict[str, RequestOutput] = {}
        try:
            for number, token_ids in enumerate(sequences):
                self._add(f"{PROBE}{number}", token_ids, score_params())
            while len(outputs) < len(sequences):
                for output in self.core.step():
                    if output.request_id in self.under_way:
                        self._take(output)
                    else:
                        outputs[output.request_id] = output
        except self.dead as death:
            self._restart(death)
            return self.token_logp(sequences)
        return [prompt_logp(outputs[f"{PROBE}{number}"]) for number in range(len(sequences))]

    def sleep(self) -> None:
        """Free the GPU's memory until the next refresh; nothing on CPU.

        Level 2 drops the weights, since a refresh brings all of them. One that brings an adapter needs those below it.
        """
        if not self.is_asleep:
            self.is_asleep = self.core.sleep(1 if self._takes_adapters else 2)

    def counts(self) -> dict[str, float]:
        return {
            "prefix_cache_queries": self.num_prompt_tokens,
            "prefix_cache_hits": self.num_cached_tokens,
            "engine_restarts": self.num_restarts,
            "engine_retried_turns": self.num_retried_turns,
            "engine_continued_turns": self.num_continued_turns,
        }

    def close(self) -> None:
        """From any thread; a waiting call gets an error, and nothing restarts."""
        self.is_closed = True
        self.core.stop()
        self.weights.close()

    def _ask(self, name: str) -> None:
        turn = self.under_way[name]
        params = turn_params(turn, self.sampling, self._end_ids(turn.request))
        self._add(name, [*self.conversation[turn.request.episode], *turn.token_ids], params)

    def _add(self, name: str, token_ids: list[int], params: SamplingParams) -> None:
        self.core.add(name, token_ids, params, salt=str(self.policy_version))

    def _finished(self) -> list[RequestOutput]:
        try:
            return self.core.step()
        except self.dead as death:
            self._restart(death)
            return []

    @property
    def dead(self) -> type[Exception]:
        return core_death()

    def _take(self, output: RequestOutput) -> None:
        """A turn, or a part of one that a refresh ended."""
        turn, completion = self.under_way[output.request_id], output.outputs[0]
        token_ids = list(completion.token_ids)
        versions = {span.version for span in completion.weight_versions or []}
        if token_ids and versions != {str(self.policy_version)}:
            del self.under_way[output.request_id]
            raise ValueError(
                f"vLLM wrote a turn with weights it calls {sorted(versions)} where policy version "
                f"{self.policy_version} was asked for, so a refresh was interrupted and no single policy wrote it. "
                f"Start the run again; it continues from its checkpoint."
            )
        sampler_logp = [entry[token].logprob for entry, token in zip(completion.logprobs, token_ids, strict=True)]
        self.num_prompt_tokens += len(output.prompt_token_ids or [])
        self.num_cached_tokens += output.num_cached_tokens or 0
        finish = read_finish(token_ids, completion.finish_reason, self._end_ids(turn.request))
        piece = token_ids, sampler_logp, self.policy_version, finish
        reply = turn.add(*piece, stop_strings=self.sampling.stop_strings, chat=self.chat)
        if reply is None:
            assert self.is_refreshing, "nothing else ends a request"
            self.num_continued_turns += 1
            return
        del self.under_way[output.request_id]
        self.conversation[reply.episode] += reply.token_ids
        self.replies.append(reply)

    def _end_ids(self, request: TurnRequest) -> list[int]:
        return [*self.chat.end_ids, *request.end_ids]

    def _start(self) -> VLLMCore:
        return start_core(self.served, self.settings, self.sampling, lora=self.lora)

    def _restart(self, death: Exception) -> None:
        """Start a new core with the current weights and repeat the turns under way, until one survives."""
        failure: Exception | None = death
        while failure is not None:
            self._count(failure)
            self.core.stop()
            failure = self._begin_again()

    def _begin_again(self) -> Exception | None:
        """The failure that interrupted it, if any. Turns stay under way until vLLM answers them."""
        try:
            self.core = self._start()
            if self.is_closed:  # closed while this one started: `close` stopped the one before
                self.core.stop()
                raise ValueError(CLOSED)
            self.is_asleep = False
            if self.adapter is not None:
                self.core.load_adapter(self.adapter)
            self.core.label(str(self.policy_version))
            for name in () if self.is_refreshing else self.under_way:
                self._ask(name)
                self.num_retried_turns += 1
        except (NotStarted, self.dead) as failure:
            return failure
        return None

    def _count(self, failure: Exception) -> None:
        if self.is_closed:
            raise ValueError(CLOSED)
        if self.num_restarts >= self.options.max_restarts:
            what = str(failure) if isinstance(failure, NotStarted) else "vLLM's process died."
            raise ValueError(
                f"{what} engine.settings.max_restarts ({self.options.max_restarts}) is used up, so the run stops here. "
                f"See vLLM's log above for the cause, then run again: it continues from the last checkpoint."
            ) from failure
        if self.options.transfer == "ipc" and not self.has_first_weights:
            raise ValueError(
                "vLLM's process died, and with it the only copy of the weights sent by IPC. "
                "See vLLM's log above for the cause, then run again: it continues from the last checkpoint."
            ) from failure
        self.num_restarts += 1
