"""The vLLM servers of one engine: which episode goes where, and what happens when one fails.

An episode stays with its server, whose prefix cache has it; a new one goes to the server with the fewest. A server that
dies, hangs or answers nonsense is restarted if it was started here; an external one leaves rotation and is asked again
with growing pauses. Its episodes move to others. Each failure counts against `engine.settings.max_restarts`, and each
outage of external servers once, however many it takes; beyond that the run stops. A server gets turns only while it is
known to serve the newest weights whole (`server.py`). All of this runs on one event loop, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.passing_faults import PassingFault
from tasks.core.terminal import tell
from tasks.core.text import counted
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.server import Reading, Server, StartProcess, Weights
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.settings import VLLMSettings
from tasks.engines.vllm.waiting import wait_for
from tasks.rollouts.engine import EpisodeHandle

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
OUTAGE_SECONDS = 60.0  # within which an outage of a network or a node takes server after server


class Servers:
    """`log_folder` takes the servers' output and failures.jsonl. `reading` keeps a folder of weights in place."""

    def __init__(
        self,
        settings: VLLMSettings,
        *,
        make_client: Callable[[str], VLLMClient],
        start_process: StartProcess,
        reading: Reading,
        log_folder: Path,
    ):
        self.settings, self.start_process, self.log_folder = settings, start_process, log_folder
        urls = settings.urls or [""] * settings.num_servers
        self.all = [Server(number, make_client(url), reading) for number, url in enumerate(urls, start=1)]
        self.home: dict[EpisodeHandle, Server] = {}
        self.weights: Weights | None = None
        self.num_restarts = self.num_retried_turns = self.num_continued_turns = self.num_redone_refreshes = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.outage_since = -math.inf  # the last one that was counted
        self.stopped: Exception | None = None
        self.changed = asyncio.Event()
        self.background: set[asyncio.Task[None]] = set()

    async def open(self, weights: Weights, on_ready: Callable[[str], None]) -> None:
        """Have every server serve `weights`; external ones may still be starting. One that does not start is fatal
        here: the cause seldom goes away by itself.
        """
        self.weights = weights
        if self.settings.urls:
            await wait_for([server.client for server in self.all], self.settings.start_timeout_seconds)

        async def bring_up(server: Server) -> None:
            where = f" at {server.client.url}" if self.settings.urls else ""
            try:
                await self._bring_up(server)
            except ServerDown as down:
                raise ValueError(
                    f"vLLM server {server.number}{where} is not there: {down}. Without it there are no rollouts. "
                    f"Fix the cause above or engine.settings, and run again."
                ) from None
            on_ready(server.client.url)

        await asyncio.gather(*map(bring_up, self.all))

    async def place(self, episode: EpisodeHandle) -> Server:
        """The episode's server if it is in rotation, else the one with the fewest; waits until one is ready."""
        while True:
            if self.stopped is not None:
                raise self.stopped
            server = self.home.get(episode)
            if server is None or server.state == "down":
                there = [server for server in self.all if server.state != "down"]
                server = min(there, key=lambda server: len(server.episodes), default=None)
            if server is None or server.state == "busy":
                await self.changed.wait()
            elif server.weights is not None and server.is_silent(server.weights):
                await self._keep(server, server.confirm(server.weights))
            else:
                self.release(episode)
                self.home[episode] = server
                server.episodes.add(episode)
                return server

    def release(self, episode: EpisodeHandle) -> None:
        server = self.home.pop(episode, None)
        if server is not None:
            server.episodes.discard(episode)

    async def ready(self) -> list[Server]:
        while not (found := [server for server in self.all if server.state == "ready"]):
            if self.stopped is not None:
                raise self.stopped
            await self.changed.wait()
        return found

    async def serve(self, weights: Weights) -> None:
        """Have every server in rotation serve new weights; turns under way go on with them. One that fails, or is
        recovering, loads the newest itself.
        """
        self.weights = weights
        await asyncio.gather(*map(self._refresh, await self.ready()))

    async def serve_again(self) -> None:
        self.num_redone_refreshes += 1
        self.record("refresh_redone", reason="the servers' log-probs differ")
        await self.serve(replace(self._newest()))

    async def fail(self, server: Server, incarnation: int, down: ServerDown) -> None:
        """Take a failed server out of rotation and recover it; a failure that is already handled counts once."""
        if server.incarnation != incarnation:
            return
        server.incarnation += 1
        server.state = "down"
        self._tell_of_change()
        if self.stopped is not None:
            return
        task = asyncio.get_running_loop().create_task(self._recover(server, down))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    @property
    def num_redone(self) -> int:
        """Loads of weights that were repeated."""
        return self.num_redone_refreshes + sum(server.num_redone_loads for server in self.all)

    def record(self, event: str, **details: Any) -> None:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        with (self.log_folder / "failures.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"time": round(time.time(), 3), "event": event} | details) + "\n")

    async def close(self) -> None:
        self._stop(ValueError("the engine is closed"))
        for task in list(self.background):
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        processes = [server.process for server in self.all if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        for server in self.all:
            server.close()
            await server.client.close()

    def _newest(self) -> Weights:
        assert self.weights is not None
        return self.weights

    async def _bring_up(self, server: Server) -> None:
        async with server.work:
            if self.settings.urls:
                await server.meet(self._newest)
            else:
                await server.start(self._newest, self.start_process)
            self._refuse_other_version(server)
            self._put_into_rotation(server)

    def _refuse_other_version(self, server: Server) -> None:
        """ValueError where external servers run several versions of vLLM."""
        for other in self.all:
            if None not in (server.vllm_version, other.vllm_version) and server.vllm_version != other.vllm_version:
                raise ValueError(
                    f"vLLM {server} runs vLLM {server.vllm_version} and {other} runs {other.vllm_version}, so they may "
                    f"compute and take weights differently. Start all servers in engine.settings.urls with one version."
                )

    async def _refresh(self, server: Server) -> None:
        if server.state != "ready":  # whoever has it brings it the newest
            return
        is_whole = await self._keep(server, server.update(self._newest))
        if not is_whole:
            self.num_redone_refreshes += 1
            self.record("refresh_redone", server=server.number, reason="new weights did not reach it whole")

    async def _keep(self, server: Server, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` on a server that gets no turns meanwhile, nor before it has the newest weights; False where it
        failed.
        """
        server.state, incarnation = "busy", server.incarnation
        async with server.work:
            try:
                await work
                await server.update(self._newest)  # new ones may have come meanwhile
            except ServerDown as down:
                await self.fail(server, incarnation, down)
                return False
            if server.incarnation != incarnation:
                return False
            self._put_into_rotation(server)
        return True

    async def _recover(self, server: Server, down: ServerDown) -> None:
        """Bring a server back. Each start counts, and each outage of an external one."""
        since, pause = time.monotonic(), 0.0
        try:
            while True:
                if server.process is not None or not pause:
                    await self._count(server, down)
                try:
                    if server.process is not None:
                        await asyncio.to_thread(server.process.stop)
                    pause = min(max(FIRST_PAUSE_SECONDS, 2 * pause), LONGEST_PAUSE_SECONDS)
                    await asyncio.sleep(0.0 if server.process else pause)
                    await self._bring_up(server)
                    break
                except ServerDown as again:
                    down = again
                    self._refuse_to_wait_for_ever(server, down, since)
        except Exception as error:  # nobody awaits this task: pass the error to those that wait for a server
            self._stop(error)
            return
        tell(
            f"vLLM server {server.number} is back. What it did not answer was repeated with the same ids and "
            f"seeds: {counted(server.num_lost_turns, 'turn')}."
        )
        server.num_lost_turns = 0

    async def _count(self, server: Server, down: ServerDown) -> None:
        limit, process = self.settings.max_restarts, server.process
        self.record("server_failed", server=server.number, reason=str(down))
        is_counted, server.last_failure = self._is_of_a_counted_outage(server), time.monotonic()
        if not is_counted and self.num_restarts >= limit:
            words = f" {ended}." if process is not None and (ended := await process.ending()) else ""
            raise (ValueError if process is not None else PassingFault)(
                f"vLLM server {server.number} failed ({down}), and engine.settings.max_restarts ({limit}) are used up, "
                f"so no more can be generated.{words} Finished episodes are kept. See {self.log_folder}, fix the "
                f"cause, and run again to continue."
            )
        if not is_counted:
            self.num_restarts, self.outage_since = self.num_restarts + 1, server.last_failure
        done = "started again" if process is not None else "out of rotation until it answers"
        tell(f"vLLM server {server.number}: {down}; {done} ({self.num_restarts} of at most {limit}).")

    def _is_of_a_counted_outage(self, server: Server) -> bool:
        """Whether an external server fails with others: it did not fail in this outage yet, and fails soon after the
        first, or has not answered since. So all of them may fail once per outage, and none for ever.
        """
        is_soon = time.monotonic() - self.outage_since < OUTAGE_SECONDS
        is_in_it = is_soon or server.last_answer < self.outage_since
        return server.process is None and server.last_failure < self.outage_since and is_in_it

    def _refuse_to_wait_for_ever(self, server: Server, down: ServerDown, since: float) -> None:
        seconds, limit = time.monotonic() - since, self.settings.start_timeout_seconds
        if server.process is None and seconds > limit and all(other.state == "down" for other in self.all):
            raise PassingFault(
                f"vLLM server {server.number} at {server.client.url} has been away for {seconds:.0f} s ({down}), "
                f"longer than engine.settings.start_timeout_seconds ({limit:g}), and there is no other. Finished "
                f"episodes are kept: start the server and run again to continue."
            )

    def _put_into_rotation(self, server: Server) -> None:
        assert server.weights is self.weights, "it missed a version"
        server.state, server.last_answer = "ready", time.monotonic()
        self._tell_of_change()

    def _stop(self, error: Exception) -> None:
        self.stopped = self.stopped or error
        self._tell_of_change()

    def _tell_of_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
