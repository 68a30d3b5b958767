"""Waiting on the event loop for what another thread writes: until it is there, its reader hangs up, or we close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tasks.gateway.completions import ProtocolError

Awaited = TypeVar("Awaited")
log = logging.getLogger(__name__)


class HungUp(Exception):
    """Nobody waits for the answer any more."""


class Waiting(Generic[Awaited]):
    """`hang_up` ends when the reader hangs up. Use `stop` at the end: it cancels what is not there yet."""

    def __init__(self, work: Future[Awaited], closing: asyncio.Event, hang_up: Coroutine[Any, Any, None] | None = None):
        self.work = asyncio.wrap_future(work)
        self._closed = asyncio.ensure_future(closing.wait())
        self._hung_up = asyncio.ensure_future(hang_up) if hang_up is not None else None

    async def whole(self) -> Awaited:
        """What is waited for, however long it takes."""
        result = await self.result()
        assert result is not None
        return result

    async def result(self, *, timeout_seconds: float | None = None) -> Awaited | None:
        """None if it is not there in time. HungUp; ProtocolError for whatever else went wrong."""
        waited: set[asyncio.Future[Any]] = {self.work, self._closed, *([self._hung_up] if self._hung_up else [])}
        await asyncio.wait(waited, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.work.done():
            return self._finished()
        if self._hung_up and self._hung_up.done():
            raise HungUp
        if self._closed.done():
            raise ProtocolError(503, "The gateway is closing and answers nothing any more.", code="gateway_closing")
        return None

    def _finished(self) -> Awaited:
        if self.work.cancelled():
            raise ProtocolError(503, "This was given up, since the episode is over.", code="given_up")
        return told(self.work.result)

    def stop(self) -> None:
        for waited in (self.work, self._closed, self._hung_up):
            if waited is not None:
                waited.cancel()


def told(ask: Callable[[], Awaited]) -> Awaited:
    """What `ask` returns. An error that is not the agent's is logged and becomes ProtocolError 500, without its words:
    they may name files and secrets.
    """
    try:
        return ask()
    except ProtocolError:
        raise
    except Exception as error:
        log.error("gateway: a request failed", exc_info=error)
        message = f"The server failed ({type(error).__name__}); its log says why."
        raise ProtocolError(500, message, code="server_error") from None
