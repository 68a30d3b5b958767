"""An MCP server at a URL, spoken to by streamable HTTP, in bounded memory: the SDK bounds events, and we the rest."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from tasks.environments.mcp_transports import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import httpx2
    from mcp.client._transport import TransportStreams


class HttpConnector:
    """A server at a URL, spoken to by streamable HTTP."""

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_seconds: float):
        self.url, self.headers, self.timeout_seconds = url, dict(headers), timeout_seconds
        self.flaw, self.status, self.folder = "", 0, ""
        self._is_open = False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TransportStreams]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        client = httpx2.AsyncClient(
            headers={**self.headers, "Accept-Encoding": "identity"},
            verify=_certificates(),
            timeout=self.timeout_seconds,
            event_hooks={"request": [_be_patient], "response": [self._watch]},
        )
        self._is_open = True
        try:
            async with (
                client,
                streamable_http_client(self.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
            ):
                yield streams
        finally:
            self._is_open = False

    @property
    def is_alive(self) -> bool:
        return self._is_open

    def forget(self) -> None:
        self.flaw, self.status = "", 0

    def account(self) -> str:
        return self.flaw or (f"answered HTTP {self.status}" if self.status else "")

    def last_words(self) -> str:
        return ""

    async def _watch(self, response: httpx2.Response) -> None:
        """Note an error status, and count the bytes of an answer as they come. A packed answer, though we asked for
        none, is refused: it could unpack to a thousand times its size.
        """
        import httpx2

        if response.status_code >= 400 and response.request.method == "POST":
            self.status = response.status_code
        if response.headers.get("content-encoding", "identity") != "identity":
            self.flaw = "sent a packed answer, though asked for none"
            raise httpx2.StreamError(self.flaw)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            response.stream = _bounded(response.stream, self)


async def _be_patient(request: httpx2.Request) -> None:
    """The stream on which a server says what nobody asked for may be silent for as long as it likes."""
    if request.method == "GET":
        request.extensions["timeout"] = {**request.extensions["timeout"], "read": None}


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes 40 ms, most of what a session costs."""
    import httpx2

    return httpx2.create_ssl_context()


def _bounded(stream: Any, connector: HttpConnector) -> Any:
    """The bytes of an answer, up to MAX_MESSAGE_BYTES."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for piece in stream:
                num_bytes += len(piece)
                if num_bytes > MAX_MESSAGE_BYTES:
                    connector.flaw = f"sent a message of more than {MAX_MESSAGE_BYTES >> 20} MB"
                    raise httpx2.StreamError(connector.flaw)
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
