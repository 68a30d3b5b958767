"""One vLLM server of an engine, started here or external, and the weights it is known to serve.

It is paused while it loads: turns under way are answered with their tokens so far. It gets the label of new weights
when they are loaded and the prefix cache is empty, so an interrupted refresh is visible both in `weights` here and in
the server's own label. Then its log-probs are held against the trainer's, before it gets a turn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tasks.core.text import one_line
from tasks.engines.vllm.answers import Answer
from tasks.engines.vllm.client import ConnectionLost, VLLMClient
from tasks.engines.vllm.nccl import NCCLSender
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.settings import WRONG_DTYPE
from tasks.engines.vllm.weights_folder import RECORD, read_record
from tasks.models.policy_weights import Probe
from tasks.rollouts.engine import EpisodeHandle
from tasks.rollouts.probe import Comparison, compare_logp

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIRM_AFTER_SECONDS = 5.0  # of silence; less than any vLLM needs to start, so a restart is noticed
PAUSE_AGAIN_SECONDS = 0.02  # for a turn that was on its way when the server was paused


@dataclass(frozen=True, slots=True)
class Weights:
    """In a folder, or in `tensors`, or in an `adapter` over the folder's: a server then starts from the folder.

    `label` None: nothing was exported yet. Tensors go from `device`. `probe` is what every server is held to that loads
    them.
    """

    folder: Path
    label: str | None
    policy_version: int
    tensors: dict[str, Tensor] | None = None
    adapter: Path | None = None
    probe: Probe | None = None
    device: torch.device | None = None

    @property
    def are_in_the_folder(self) -> bool:
        return self.tensors is None and self.adapter is None


class StartedServer(Protocol):
    """A server of ours, on this machine or another: at `url`, once `wait_ready` has returned."""

    @property
    def url(self) -> str: ...

    async def wait_ready(self) -> float:
        """ServerDown where it ends first or takes too long."""
        ...

    async def ending(self) -> str:
        """The end of its log, for a message; "" while it runs."""
        ...

    def stop(self) -> None:
        """End all its processes; blocks until they are gone."""
        ...


Reading = Callable[[Path], AbstractContextManager[None]]  # inside, the folder stays (WeightsFolder.reading)
StartProcess = Callable[[Path, int], StartedServer]  # a server of ours over a folder, by its number


@dataclass(slots=True, eq=False)
class Server:
    """`process` is None for an external server. `incarnation` tells an old failure from a new one."""

    number: int
    client: VLLMClient
    reading: Reading
    process: StartedServer | None = None
    sender: NCCLSender | None = None  # since it was started or connected
    weights: Weights | None = None
    state: Literal["ready", "busy", "down"] = "down"
    incarnation: int = 0
    num_in_flight: int = 0
    num_lost_turns: int = 0  # since it was last ready
    num_redone_loads: int = 0
    vllm_version: str | None = None  # of an external one
    is_ending_turns: bool = False
    calls: set[asyncio.Task[Answer]] = field(default_factory=set)  # of turns that it has not answered
    work: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever loads weights into it
    last_answer: float = 0.0
    last_failure: float = -math.inf
    episodes: set[EpisodeHandle] = field(default_factory=set)

    async def start(self, newest: Callable[[], Weights], start_process: StartProcess) -> None:
        weights = newest()
        with self.reading(weights.folder):
            check_whole(weights.folder)
            self.process = start_process(weights.folder, self.number)
            await self.client.move(self.process.url)
            await self.process.wait_ready()
        self._forget()
        if weights.are_in_the_folder:
            if weights.label is not None:
                await self.client.set_label(weights.label)
            if await self._compare(weights) is None:
                self.weights = weights
            else:
                self.num_redone_loads += 1  # by `update`
        await self.update(newest)

    async def meet(self, newest: Callable[[], Weights]) -> None:
        """Connect to an external server: ask its model's name, and bring it the newest weights."""
        if not await self.client.is_healthy():
            raise ServerDown("GET /health is not answered with 200")
        self.client.model = await self.client.served_model()
        self.vllm_version = await self.client.vllm_version()
        if await self.client.label() is not None:
            await self.client.resume()  # a run that was killed may have left it paused
        await self.client.check_logprobs_mode()
        self._forget()
        await self.update(newest)

    async def update(self, newest: Callable[[], Weights]) -> None:
        """Load weights until they are the newest. ServerDown where it fails; ValueError where it has others twice."""
        while self.weights is not (weights := newest()):
            if weights.label is not None:
                await self._take(weights, weights.label)
            self.weights = weights

    async def _take(self, weights: Weights, label: str) -> None:
        for may_load_again in (True, False):
            await self._end_turns()
            await self._load(weights)
            await self.client.serve_loaded(label)
            await self.client.resume()
            found = await self._compare(weights)
            if found is None:
                return
            if not may_load_again:
                raise self._other_weights(found, weights)
            self.num_redone_loads += 1

    async def _end_turns(self) -> None:
        """Have it answer each turn under way with its tokens so far, so that none is written by two policies.

        A request that arrives after the pause waits in the server, so the pause is repeated until all are answered.
        """
        seconds, self.is_ending_turns = self.client.timeout_seconds, True
        try:
            async with asyncio.timeout(seconds):
                await self.client.pause()
                while self.num_in_flight:
                    await asyncio.sleep(PAUSE_AGAIN_SECONDS)
                    await self.client.pause()
        except TimeoutError:
            raise ServerDown(
                f"it did not pause within {seconds:g} s (engine.settings.request_timeout_seconds)"
            ) from None
        finally:
            self.is_ending_turns = False

    async def _load(self, weights: Weights) -> None:
        if weights.adapter is not None:
            with self.reading(weights.adapter):
                await self.client.load_adapter(weights.adapter)
        elif weights.tensors is not None:
            self.sender = self.sender or NCCLSender(self.client)
            assert weights.device is not None
            await self.sender.send(weights.tensors, weights.device)
        else:
            with self.reading(weights.folder):
                await self.client.load_weights(weights.folder)

    async def _compare(self, weights: Weights) -> Comparison | None:
        """Where its log-probs of the probe are not the trainer's."""
        probe = weights.probe
        if probe is None:
            return None
        found = compare_logp(await asyncio.gather(*map(self.client.token_logp, probe.sequences)), probe.logp)
        return None if found.differences.is_within(probe.tolerance) else found

    def _other_weights(self, found: Comparison, weights: Weights) -> ValueError:
        assert weights.probe is not None
        return ValueError(
            f"vLLM {self} loaded the weights of policy version {weights.policy_version} and computes with others, so "
            f"its turns would be of another policy. Its log-probs differ from the trainer's (nats): {found}; "
            f"engine.probe_tolerance allows {weights.probe.tolerance}. {self._remedy()}, and run again; it continues "
            f"from the last checkpoint."
        )

    def _remedy(self) -> str:
        if self.process is not None:
            return WRONG_DTYPE
        return "Start it on the model that is trained, with the --dtype of engine.settings.dtype"

    def __str__(self) -> str:
        return f"server {self.number}" + ("" if self.process is not None else f" at {self.client.url}")

    def _forget(self) -> None:
        """It may be another process now: its weights and its NCCL group are unknown."""
        self.weights = None
        self.close()

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    async def confirm(self, weights: Weights) -> None:
        """ServerDown where its label is not that of `weights`: its owner may have restarted it on old ones."""
        try:
            label = await self.client.label()
        except ConnectionLost:  # perhaps an idle connection was closed; try a second one
            label = await self.client.label()
        if label != weights.label:
            for call in self.calls:  # sent to a process that is gone, or to the one with other weights
                call.cancel()
            raise ServerDown(f"it serves weights {label!r} and should serve {weights.label!r}")

    async def answer(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Of the client's `call`. ServerDown where the server is found to be another process meanwhile."""
        task = asyncio.ensure_future(call)
        self.calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            raise ServerDown("it was started again in the middle of the turn") from None
        finally:
            self.calls.discard(task)

    async def take_answer(self, weights: Weights) -> None:
        """Note that it answered a turn with `weights`. After a silence it may have been restarted since the turn was
        sent, and have answered with old ones: ServerDown.
        """
        answered = time.monotonic()
        if self.is_silent(weights):
            await self.confirm(weights)
        self.last_answer = max(self.last_answer, answered)

    def is_silent(self, weights: Weights) -> bool:
        """Long enough that it may have been restarted without these `weights`, whatever turns hang."""
        return time.monotonic() - self.last_answer > CONFIRM_AFTER_SECONDS and weights.label is not None

    async def is_up(self) -> bool:
        return (self.process is None or not await self.process.ending()) and await self.client.is_healthy()


class TornWeights(ValueError):
    """Exported weights that are not what was written."""


def check_whole(folder: Path) -> None:
    """TornWeights where an exported copy is not whole; other folders are accepted."""
    if (folder / RECORD).exists():
        try:
            read_record(folder)
        except Exception as error:  # torn files fail in many ways
            raise TornWeights(f"{folder}: not whole, so not to be served: {one_line(error)}") from None
