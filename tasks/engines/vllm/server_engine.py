"""vLLM behind its OpenAI-compatible servers, started here on their own sockets or external.

Every turn is one request with the whole conversation as token ids; the server's prefix cache has the earlier part. This
is the caller's side. On the event loop, `turns.py` asks until a turn is answered, `servers.py` chooses the server, and
`client.py` sends. Weights go through a folder, or by NCCL (`nccl.py`).
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tasks.core.background import event_loop, run
from tasks.core.progress import progress_bar
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.ipc import check_transfer
from tasks.engines.vllm.nccl import copies, sends_from
from tasks.engines.vllm.server import StartedServer, TornWeights, Weights, check_whole
from tasks.engines.vllm.server_process import MODEL_NAME, ServerDown, ServerProcess, num_gpus
from tasks.engines.vllm.servers import Servers
from tasks.engines.vllm.settings import WRONG_DTYPE, address_of
from tasks.engines.vllm.shared import Start, max_model_len, vocabulary_size
from tasks.engines.vllm.turns import ask_turn, score_on_all
from tasks.engines.vllm.waiting import wait_for
from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import EpisodeHandle, FixedWeights, TurnReply, TurnRequest, never
from tasks.rollouts.settings import SERVERS_ON_RAY

Result = TypeVar("Result")
TICK_SECONDS = 0.01  # between two checks whether `poll` should end early


class ServerEngine:
    """Generates with the model in `folder`, later with what `refresh` brings. Servers start when first needed.

    With `lora` the policy is an adapter over the weights in `folder`: servers started here then get it alone, those in
    `urls` the merged weights.
    """

    has_own_memory = True
    remedy = WRONG_DTYPE

    def __init__(self, start: Start):
        options, settings = start.options, start.settings
        self.knows_its_weights = not options.urls
        check_transfer(options.transfer, mode="server", on_gpu=num_gpus() > 0)
        self.model_folder, self.sampling, self.options = start.folder, start.sampling, options
        self.max_num_seqs = math.ceil(settings.max_concurrent_episodes / options.num_servers)
        self.tolerance, self.end_ids = settings.tolerance(options.dtype), start.chat.end_ids
        self.chat = start.chat
        self.vocabulary_size = vocabulary_size(start.folder, start.chat.tokenizer)
        self.policy_version = 0
        self.weights_folder = start.weights_folder()
        self.lora = None if options.urls else start.lora
        self.first_folder: Path | None = None
        self.log_folder = self.weights_folder.logs
        self.run_name, self.num_refreshes, self.num_torn_exports = uuid.uuid4().hex[:12], 0, 0
        self.servers: Servers | None = None
        self.conversations: dict[EpisodeHandle, list[int]] = {}
        self.done: SimpleQueue[TurnReply | Exception] = SimpleQueue()
        self.num_turns = 0

    def submit(self, request: TurnRequest) -> None:
        servers = self._open_once()
        prompt = self.conversations.setdefault(request.episode, [])
        prompt += request.token_ids
        self.num_turns += 1
        run(self._turn(servers, request, list(prompt)))

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        replies: list[TurnReply] = []
        while self.num_turns:
            try:
                reply = self.done.get(block=not replies, timeout=TICK_SECONDS)
            except Empty:
                if replies or until():
                    break
                continue
            self.num_turns -= 1
            if isinstance(reply, Exception):
                raise reply
            self.conversations[reply.episode] += reply.token_ids
            replies.append(reply)
        return replies

    def release(self, episode: EpisodeHandle) -> None:
        del self.conversations[episode]
        if self.servers is not None:
            event_loop().call_soon_threadsafe(self.servers.release, episode)

    def refresh(self, given: PolicyWeights, policy_version: int) -> None:
        """Export the weights and have every server load them; turns under way go on with them. A server that missed
        them gets no turn before it has them.
        """
        self._refuse_without_routes()
        self.num_refreshes += 1
        weights = self._weights(given, policy_version)
        if self.servers is None:
            self._open(weights)
        else:
            _wait(self.servers.serve(weights))
        self.policy_version = policy_version

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        servers = self._open_once()
        return _wait(score_on_all(servers, [list(token_ids) for token_ids in sequences], tolerance=self.tolerance))

    def sleep(self) -> None:
        """Servers have a device of their own, and stay awake."""

    def counts(self) -> dict[str, float]:
        servers = self.servers
        return {
            "engine_restarts": servers.num_restarts if servers else 0,
            "engine_retried_turns": servers.num_retried_turns if servers else 0,
            "engine_continued_turns": servers.num_continued_turns if servers else 0,
            "refreshes_redone": self.num_torn_exports + (servers.num_redone if servers else 0),
            "prefix_cache_queries": servers.num_prompt_tokens if servers else 0,
            "prefix_cache_hits": servers.num_cached_tokens if servers else 0,
        }

    def close(self) -> None:
        """Stop the servers started here and delete the weights; logs stay until a later run on this machine."""
        if self.servers is not None:
            _wait(self.servers.close())
        self.weights_folder.close()

    def _open_once(self) -> Servers:
        if self.servers is None:
            self._open(Weights(self._first_folder(), None, 0))
        assert self.servers is not None
        return self.servers

    def _first_folder(self) -> Path:
        if self.first_folder is None:
            own = self.model_folder if self.options.urls else self.weights_folder.open_model(self.model_folder)
            self.first_folder = own
        return self.first_folder

    def _weights(self, given: PolicyWeights, policy_version: int) -> Weights:
        label = f"{self.run_name}-{self.num_refreshes}"
        if self.lora is not None and given.save_adapter is not None:
            adapter = self.weights_folder.export_adapter(given.save_adapter, policy_version)
            return Weights(self._first_folder(), label, policy_version, adapter=adapter, probe=given.probe)
        self.lora = None  # other weights come below it
        if self.options.transfer == "disk":
            return Weights(self._export(given, policy_version), label, policy_version, probe=given.probe)
        served = self.servers.weights if self.servers is not None else None
        folder = served.folder if served is not None else self._first_folder()
        tensors = copies(given, self.weights_folder.dtype)
        return Weights(folder, label, policy_version, tensors, probe=given.probe, device=sends_from(given))

    def _export(self, given: PolicyWeights, policy_version: int) -> Path:
        folder = self.weights_folder.export(given, policy_version)
        try:
            check_whole(folder)
        except TornWeights:
            self.num_torn_exports += 1
            self.weights_folder.remove(folder)  # not the one before: a server may be starting from it
            folder = self.weights_folder.export(given, policy_version)
            check_whole(folder)
        return folder

    def _open(self, weights: Weights) -> None:
        self.servers = _wait(self._make_servers())
        count = len(self.servers.all)
        with progress_bar(f"vLLM server{'s' if count > 1 else ''}", total=count) as bar:
            try:
                _wait(self.servers.open(weights, bar.advance))
            except BaseException:
                self.close()
                raise

    async def _make_servers(self) -> Servers:
        """Called on the event loop that the new objects belong to."""
        return Servers(
            self.options,
            make_client=self._make_client,
            start_process=self._start_process,
            reading=self.weights_folder.reading,
            log_folder=self.log_folder,
        )

    def _start_process(self, folder: Path, number: int) -> StartedServer:
        make: Any = ServerProcess
        if SERVERS_ON_RAY in os.environ:
            from tasks.engines.vllm.on_ray import HostedServer

            make = HostedServer
        return make(
            folder,
            self.options,
            number=number,
            max_model_len=max_model_len(self.model_folder, self.sampling),
            max_num_seqs=self.max_num_seqs,
            log_folder=self.log_folder,
            lora=self.lora,
        )

    def _make_client(self, url: str) -> VLLMClient:
        return VLLMClient(
            address_of(url),
            model=MODEL_NAME,
            sampling=self.sampling,
            end_ids=self.end_ids,
            vocabulary_size=self.vocabulary_size,
            timeout_seconds=self.options.request_timeout_seconds,
        )

    def _refuse_without_routes(self) -> None:
        """FixedWeights where servers accept no new weights, before the first are written."""
        if self.options.urls and not self.num_refreshes:
            clients = [self._make_client(url) for url in self.options.urls]
            _wait(_check_routes(clients, self.options.start_timeout_seconds))

    async def _turn(self, servers: Servers, request: TurnRequest, prompt: list[int]) -> None:
        try:
            self.done.put(await ask_turn(servers, request, prompt, self.chat))
        except Exception as error:  # the caller is on another thread: poll raises it there
            self.done.put(error)


async def _check_routes(clients: list[VLLMClient], seconds: float) -> None:
    """Wait for the servers up to `seconds`, and ask each for its label."""
    try:
        await wait_for(clients, seconds)
        for client in clients:
            await _check_route(client)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def _check_route(client: VLLMClient) -> None:
    try:
        label = await client.label()
    except ServerDown as down:
        raise ValueError(
            f"vLLM server at {client.url} is not there: {down}. Start it, or correct engine.settings.urls."
        ) from None
    if label is None:
        raise FixedWeights(
            f"vLLM server at {client.url} has no routes for new weights, so training would go on generating with old "
            f"ones. Start it with VLLM_SERVER_DEV_MODE=1 and --uds PATH in a folder of your own, and set urls to "
            f"unix:PATH; or leave engine.settings.urls empty, and turnwise starts servers."
        )


def _wait(work: Coroutine[Any, Any, Result]) -> Result:
    return run(work).result()
