"""One event loop in a daemon thread, and a limited number of worker threads, for tools that wait. Both start on first
use. Workers are daemons: a call that never returns keeps its place, but does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")
LOOK_AGAIN_SECONDS = 0.5  # interval at which a waiting caller checks whether all workers are lost


class AllWorkersLost(Exception):
    """Every worker has a call that timed out and never returned."""


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop


def run(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    return asyncio.run_coroutine_threadsafe(work, event_loop())


class Workers:
    def __init__(self, limit: int):
        self.limit = limit
        self.num_lost = 0
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[[], Result], *, timeout_seconds: float) -> Result:
        """TimeoutError after `timeout_seconds`, without the wait for a worker; AllWorkersLost if none returns."""
        await self._take()
        done: Future[Result] = Future()
        waiting = asyncio.wrap_future(done)
        waiting.add_done_callback(lambda _: None if waiting.cancelled() else waiting.exception())
        threading.Thread(target=_fill, args=(done, function), name="tool", daemon=True).start()
        waiting.add_done_callback(lambda _: self._free.release())  # also where the caller has left
        finished, _ = await asyncio.wait({waiting}, timeout=timeout_seconds)
        if finished:
            return waiting.result()
        self.num_lost += 1
        waiting.add_done_callback(self._find)
        raise TimeoutError

    async def _take(self) -> None:
        while True:
            if self.num_lost >= self.limit:
                raise AllWorkersLost
            try:
                await asyncio.wait_for(self._free.acquire(), LOOK_AGAIN_SECONDS)
                return
            except TimeoutError:
                continue

    def _find(self, _: Any) -> None:
        self.num_lost -= 1


def _fill(done: Future[Result], function: Callable[[], Result]) -> None:
    try:
        done.set_result(function())
    except BaseException as error:
        done.set_exception(error)
