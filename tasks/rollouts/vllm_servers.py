"""The vLLM servers of one engine: which episode goes where, what is done when one fails, which weights each serves.

An episode stays with its server, whose prefix cache has it; a new one goes to the server with the fewest. A server that
dies, hangs or answers nonsense is started again if it is ours, and taken out of rotation and asked again with growing
pauses if it is somebody else's; its episodes go to whoever is ready. Each such event counts against
`engine.vllm.max_restarts`, and beyond that everything stops with one line.

A server gets turns only while it is known to serve the newest weights whole: it takes their label last, after the
weights are loaded and the prefix cache is empty, so that a refresh cut short anywhere shows, and is done again.

All of it runs on one event loop, so that nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.rollouts.engine import EpisodeHandle
from tasks.rollouts.options import VLLMSettings
from tasks.rollouts.vllm_client import ConnectionLost, VLLMClient
from tasks.rollouts.vllm_process import ServerDown, ServerProcess
from tasks.rollouts.weights import RECORD, read_record

CONFIRM_AFTER_SECONDS = 5.0  # of silence; less than any server needs to start, so that a new one is noticed
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights in a folder, of one policy. `label` is what a server calls them; None: nothing was ever exported, and
    every server has what it started with.
    """

    folder: Path
    label: str | None
    policy_version: int


@dataclass(slots=True, eq=False)
class Server:
    """One server. `process` is None where it is somebody else's. It is `busy` while it takes weights or is asked what
    it serves, and `down` until it is back. `incarnation` tells an old failure from a new one.
    """

    number: int
    client: VLLMClient
    process: ServerProcess | None = None
    weights: Weights | None = None
    state: Literal["ready", "busy", "down"] = "down"
    incarnation: int = 0
    num_in_flight: int = 0
    num_lost_turns: int = 0  # since it was last ready
    last_answer: float = 0.0
    episodes: set[EpisodeHandle] = field(default_factory=set)

    async def is_up(self) -> bool:
        return (self.process is None or self.process.is_alive()) and await self.client.is_healthy()


class Servers:
    """All servers of an engine. `log_folder` takes what they say and, in failures.jsonl, every failure."""

    def __init__(
        self,
        settings: VLLMSettings,
        *,
        make_client: Callable[[str], VLLMClient],
        max_model_len: int,
        log_folder: Path,
    ):
        self.settings, self.max_model_len, self.log_folder = settings, max_model_len, log_folder
        urls = settings.urls or [""] * settings.num_servers
        self.all = [Server(number, make_client(url)) for number, url in enumerate(urls, start=1)]
        self.home: dict[EpisodeHandle, Server] = {}
        self.weights: Weights | None = None
        self.num_restarts = self.num_retried_turns = self.num_redone_refreshes = 0
        self.stopped: ValueError | None = None
        self.changed = asyncio.Condition()
        self.background: set[asyncio.Task[None]] = set()

    async def open(self, weights: Weights, on_ready: Callable[[str], None]) -> None:
        """Have every server serve `weights`; `on_ready` is told about each one that does. A server that does not come
        up is fatal here: what keeps it from starting now is seldom gone a second later.
        """
        self.weights = weights

        async def start(server: Server) -> None:
            where = server.client.url
            try:
                await (self._meet(server) if self.settings.urls else self._start(server))
            except ServerDown as down:
                raise ValueError(
                    f"vLLM server {server.number}{f' at {where}' if where else ''} is not there: {down}. Without it "
                    f"there are no rollouts; correct engine.vllm, or the cause above, and run again."
                ) from None
            on_ready(server.client.url)

        await asyncio.gather(*map(start, self.all))

    async def place(self, episode: EpisodeHandle) -> Server:
        """The server of an episode, once one is ready: its own where that is, else the one with the fewest."""
        while True:
            if self.stopped is not None:
                raise self.stopped
            server = self.home.get(episode)
            if server is None or server.state == "down":
                there = [server for server in self.all if server.state != "down"]
                server = min(there, key=lambda server: len(server.episodes), default=None)
            if server is None or server.state == "busy":
                await self._wait_for_change()
            elif self._is_silent(server):
                await self._confirm(server)
            else:
                self.release(episode)
                self.home[episode] = server
                server.episodes.add(episode)
                return server

    def release(self, episode: EpisodeHandle) -> None:
        server = self.home.pop(episode, None)
        if server is not None:
            server.episodes.discard(episode)

    async def fail(self, server: Server, incarnation: int, down: ServerDown) -> None:
        """Take a server that failed out of rotation and see to it; a failure that is being seen to counts once."""
        if server.incarnation != incarnation or self.stopped is not None:
            return
        server.incarnation += 1
        server.state = "down"
        self._spawn(self._recover(server, down))

    async def serve(self, weights: Weights) -> None:
        """Have every server that is in rotation serve new weights; one that fails to is seen to, and takes them then.
        One that is being seen to meanwhile looks for the newest weights itself.
        """
        self.weights = weights
        await asyncio.gather(*map(self._refresh, await self.ready()))

    async def ready(self) -> list[Server]:
        """The servers in rotation; waits for one where there is none."""
        while not (found := [server for server in self.all if server.state == "ready"]):
            if self.stopped is not None:
                raise self.stopped
            await self._wait_for_change()
        return found

    async def serve_again(self) -> None:
        """Have every server load the newest weights again: what they serve is not what they should."""
        assert self.weights is not None
        self.num_redone_refreshes += 1
        self.record("refresh_redone", reason="the servers' log-probs differ")
        for server in await self.ready():
            server.weights = None
        await self.serve(self.weights)

    def record(self, event: str, **details: Any) -> None:
        """A line in failures.jsonl: what failed, and what was asked for again because of it."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        with (self.log_folder / "failures.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"time": round(time.time(), 3), "event": event} | details) + "\n")

    async def close(self) -> None:
        self.stopped = self.stopped or ValueError("the engine is closed")
        for task in list(self.background):
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        processes = [server.process for server in self.all if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        for server in self.all:
            await server.client.close()

    async def _refresh(self, server: Server) -> None:
        server.state, incarnation = "busy", server.incarnation
        try:
            await self._update(server)
        except ServerDown as down:
            self.num_redone_refreshes += 1
            self.record("refresh_redone", server=server.number, reason=str(down))
            await self.fail(server, incarnation, ServerDown(f"new weights did not reach it whole: {down}"))
            return
        await self._put_into_rotation(server)

    async def _update(self, server: Server) -> None:
        """Load the newest weights, and again if there are newer ones by then."""
        while server.weights is not self.weights:
            weights = self.weights
            assert weights is not None
            if weights.label is not None:
                await server.client.load_weights(weights.folder, weights.label)
            server.weights = weights

    async def _start(self, server: Server) -> None:
        """Start a server of ours on the newest weights."""
        weights = self.weights
        assert weights is not None
        check_whole(weights.folder)
        server.process = ServerProcess(
            weights.folder,
            self.settings,
            number=server.number,
            max_model_len=self.max_model_len,
            log_folder=self.log_folder,
        )
        server.client.url = server.process.url
        await server.process.wait_ready()
        if weights.label is not None:
            await server.client.set_label(weights.label)
        server.weights = weights
        await self._update(server)
        await self._put_into_rotation(server)

    async def _meet(self, server: Server) -> None:
        """Take up a server of somebody else's: learn what it calls its model, and bring it the newest weights."""
        if not await server.client.is_healthy():
            raise ServerDown("GET /health is not answered with 200")
        server.client.model = await server.client.served_model()
        await server.client.check_logprobs_mode()
        server.weights = None
        await self._update(server)
        await self._put_into_rotation(server)

    async def _recover(self, server: Server, down: ServerDown) -> None:
        pause, is_counted = FIRST_PAUSE_SECONDS, False
        while True:
            if not is_counted and not await self._may_restart(server, down):
                return
            try:
                if server.process is None:
                    is_counted = True  # one outage, however often the server is asked whether it is over
                    await asyncio.sleep(pause)
                    await self._meet(server)
                else:
                    await asyncio.to_thread(server.process.stop)
                    await self._start(server)
                print(
                    f"vLLM server {server.number} is back. {server.num_lost_turns} turns it did not answer were asked "
                    f"for again, with the same ids and seeds.",
                    flush=True,
                )
                server.num_lost_turns = 0
                return
            except ServerDown as again:
                down, pause = again, min(2 * pause, LONGEST_PAUSE_SECONDS)
            except ValueError as error:
                await self._stop(error)
                return

    async def _may_restart(self, server: Server, down: ServerDown) -> bool:
        """Count an event and say it; beyond the limit, stop everything."""
        is_ours, limit = server.process is not None, self.settings.max_restarts
        words = f" {server.process.last_words()}." if server.process and not server.process.is_alive() else ""
        self.record("server_failed", server=server.number, reason=str(down))
        if self.num_restarts >= limit:
            await self._stop(
                ValueError(
                    f"vLLM server {server.number} failed ({down}), and engine.vllm.max_restarts ({limit}) are used up, "
                    f"so no more can be generated.{words} What is finished is kept: see {self.log_folder}, put the "
                    f"cause right, and run again to go on from there."
                )
            )
            return False
        self.num_restarts += 1
        done = "started again" if is_ours else "out of rotation until it answers"
        print(f"vLLM server {server.number}: {down}; {done} ({self.num_restarts} of at most {limit}).", flush=True)
        return True

    async def _put_into_rotation(self, server: Server) -> None:
        server.state, server.last_answer = "ready", time.monotonic()
        await self._tell_of_change()

    async def _stop(self, error: ValueError) -> None:
        self.stopped = error
        await self._tell_of_change()

    async def _wait_for_change(self) -> None:
        async with self.changed:
            await self.changed.wait()

    async def _tell_of_change(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _is_silent(self, server: Server) -> bool:
        quiet = time.monotonic() - server.last_answer > CONFIRM_AFTER_SECONDS
        return quiet and server.num_in_flight == 0 and server.weights is not None and server.weights.label is not None

    async def _confirm(self, server: Server) -> None:
        """Ask a server that has been silent what it serves: its owner may have started it anew, on old weights."""
        server.state, incarnation = "busy", server.incarnation
        assert server.weights is not None
        try:
            label = await self._twice(server.client.label)
            if label != server.weights.label:
                raise ServerDown(f"it serves weights {label!r} and should serve {server.weights.label!r}")
        except ServerDown as down:
            await self.fail(server, incarnation, down)
            return
        await self._put_into_rotation(server)

    async def _twice(self, ask: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """An idle connection may have been closed; a second one tells."""
        try:
            return await ask()
        except ConnectionLost:
            return await ask()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


class TornWeights(ValueError):
    """Exported weights that are not what was written."""


def check_whole(folder: Path) -> None:
    """TornWeights where an exported copy is not whole; a folder turnwise did not export is taken as it is."""
    if (folder / RECORD).exists():
        try:
            read_record(folder)
        except Exception as error:  # a torn file fails in as many ways as there are places to tear it
            raise TornWeights(" ".join(str(error).split())) from None
