"""The HTTP client for every URL in params, with bounds on memory and time.

An endpoint may send a compressed answer that expands a thousandfold, one without end, or one that lasts for hours. So
compression is refused, an answer has at most `max_bytes`, a request takes at most `total_seconds`, and redirects, which
could lead to a server on this machine, are not followed. Import this inside functions: httpx2 comes with the packages
`mcp`, `openai` and `vllm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx2

MAX_ANSWER_BYTES = 8 << 20  # of a model's answer, or of one MCP message
Hook = Callable[[Any], Awaitable[None]]


def _ignore(*_: object) -> None:
    """Whoever asks reads the error."""


class RefusedAnswer(httpx2.TransportError):
    """An answer that must not be read; the message continues "the server …"."""


class BoundedClient(httpx2.AsyncClient):
    """`total_seconds` is None if the caller has its own limit. With `reads_events`, an event stream is left to a reader
    that limits each event.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
        total_seconds: float | None,
        reads_events: bool = False,
        on_request: Sequence[Hook] = (),
        on_response: Sequence[Hook] = (),
        on_refusal: Callable[[str], None] = _ignore,
        on_no_connection: Callable[[Exception], None] = _ignore,
        **given: Any,
    ):
        hooks = {"request": list(on_request), "response": [*on_response, self._bound]}
        as_many_as_asked = httpx2.Limits(max_connections=None)  # waiting for a connection would use up a request's time
        super().__init__(**{"limits": as_many_as_asked, **given}, event_hooks=hooks, follow_redirects=False)
        self.max_bytes, self.total_seconds, self.reads_events = max_bytes, total_seconds, reads_events
        self.on_refusal, self.on_no_connection = on_refusal, on_no_connection

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        try:
            return await self._send(request, **how)
        except httpx2.ConnectError as error:
            self.on_no_connection(error)
            raise

    async def _send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        if self.total_seconds is None:
            return await super().send(request, **how)
        try:
            async with asyncio.timeout(self.total_seconds):
                return await super().send(request, **how)
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no whole answer in {self.total_seconds:g} s", request=request) from None

    async def _bound(self, response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._refused("sent a packed answer, though asked for none")
        is_events = "text/event-stream" in response.headers.get("content-type", "")
        if not (is_events and self.reads_events):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, self)

    def _refused(self, why: str) -> RefusedAnswer:
        self.on_refusal(why)
        return RefusedAnswer(why)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, client: BoundedClient):
        self.stream, self.client = stream, client

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in self.stream:
            num_bytes += len(piece)
            if num_bytes > self.client.max_bytes:
                raise self.client._refused(f"sent a message of more than {self.client.max_bytes >> 20} MB")
            yield piece

    async def aclose(self) -> None:
        await self.stream.aclose()
