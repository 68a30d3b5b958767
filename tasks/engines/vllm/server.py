"""One vLLM server of an engine, started here or external, and the weights it is known to serve.

It gets the label of new weights last, when they are loaded and the prefix cache is empty, so an interrupted refresh is
visible both in `weights` here and in the server's own label.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.core.text import one_line
from tasks.engines.vllm.client import ConnectionLost, VLLMClient
from tasks.engines.vllm.nccl import NCCLSender
from tasks.engines.vllm.server_process import ServerDown, ServerProcess
from tasks.engines.vllm.weights_folder import RECORD, read_record
from tasks.rollouts.engine import EpisodeHandle

if TYPE_CHECKING:
    from torch import Tensor

CONFIRM_AFTER_SECONDS = 5.0  # of silence; less than any server needs to start, so a restart is noticed


@dataclass(frozen=True, slots=True)
class Weights:
    """In a folder, or in `tensors`, or in an `adapter` over the folder's: a server then starts from the folder.

    `label` None: nothing was exported yet.
    """

    folder: Path
    label: str | None
    policy_version: int
    tensors: dict[str, Tensor] | None = None
    adapter: Path | None = None

    @property
    def are_in_the_folder(self) -> bool:
        return self.tensors is None and self.adapter is None


Reading = Callable[[Path], AbstractContextManager[None]]  # inside, the folder stays (WeightsFolder.reading)
StartProcess = Callable[[Path, int], ServerProcess]  # a server of ours over a folder, by its number


@dataclass(slots=True, eq=False)
class Server:
    """`process` is None for an external server. `incarnation` tells an old failure from a new one."""

    number: int
    client: VLLMClient
    reading: Reading
    process: ServerProcess | None = None
    sender: NCCLSender | None = None  # since it was started or connected
    weights: Weights | None = None
    state: Literal["ready", "busy", "down"] = "down"
    incarnation: int = 0
    num_in_flight: int = 0
    num_lost_turns: int = 0  # since it was last ready
    last_answer: float = 0.0
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
            self.weights = weights
        await self.update(newest)

    async def meet(self, newest: Callable[[], Weights]) -> None:
        """Connect to an external server: ask its model's name, and bring it the newest weights."""
        if not await self.client.is_healthy():
            raise ServerDown("GET /health is not answered with 200")
        self.client.model = await self.client.served_model()
        await self.client.check_logprobs_mode()
        self._forget()
        await self.update(newest)

    async def update(self, newest: Callable[[], Weights]) -> None:
        while self.weights is not (weights := newest()):
            if weights.label is not None:
                await self._load(weights, weights.label)
            self.weights = weights

    async def _load(self, weights: Weights, label: str) -> None:
        if weights.adapter is not None:
            with self.reading(weights.adapter):
                await self.client.load_adapter(weights.adapter, label)
        elif weights.tensors is not None:
            self.sender = self.sender or NCCLSender(self.client)
            await self.sender.send(weights.tensors)
            await self.client.serve_loaded(label)
        else:
            with self.reading(weights.folder):
                await self.client.load_weights(weights.folder, label)

    def _forget(self) -> None:
        """It may be another process now: its weights and its NCCL group are unknown."""
        self.weights = None
        self.close()

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    async def confirm(self) -> None:
        """ServerDown where its label is not the expected one: its owner may have restarted it on old weights."""
        assert self.weights is not None
        try:
            label = await self.client.label()
        except ConnectionLost:  # perhaps an idle connection was closed; try a second one
            label = await self.client.label()
        if label != self.weights.label:
            raise ServerDown(f"it serves weights {label!r} and should serve {self.weights.label!r}")

    def is_silent(self) -> bool:
        quiet = time.monotonic() - self.last_answer > CONFIRM_AFTER_SECONDS
        return quiet and self.num_in_flight == 0 and self.weights is not None and self.weights.label is not None

    async def is_up(self) -> bool:
        return (self.process is None or self.process.is_alive()) and await self.client.is_healthy()


class TornWeights(ValueError):
    """Exported weights that are not what was written."""


def check_whole(folder: Path) -> None:
    """TornWeights where an exported copy is not whole; other folders are accepted."""
    if (folder / RECORD).exists():
        try:
            read_record(folder)
        except Exception as error:  # torn files fail in many ways
            raise TornWeights(f"{folder}: not whole, so not to be served: {one_line(error)}") from None
