"""An MCP server at a URL, by streamable HTTP. The SDK limits the memory of events; we limit the rest.

Episodes may share a connection, so what went wrong is kept per call: the SDK posts a call in the context of its caller.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tasks.environments.mcp.connector import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import httpx2
    from mcp.client._transport import TransportStreams


@dataclass
class Errors:
    flaw: str = ""
    status: int = 0


OF_CALL: ContextVar[Errors] = ContextVar("errors of a call")


class HttpConnector:
    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_seconds: float):
        self.url, self.headers, self.timeout_seconds = url, dict(headers), timeout_seconds
        self.folder = ""
        self._is_open = False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TransportStreams]:
        from mcp.client.streamable_http import streamable_http_client

        from tasks.core.bounded_http import BoundedClient

        client = BoundedClient(
            max_bytes=MAX_MESSAGE_BYTES,
            total_seconds=None,  # each call has its own limit
            reads_events=True,
            headers=self.headers,
            verify=_certificates(),
            timeout=self.timeout_seconds,
            on_request=[_be_patient],
            on_response=[self._watch],
            on_refusal=self._note,
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

    @property
    def status(self) -> int:
        return OF_CALL.get(Errors()).status

    def forget(self) -> None:
        OF_CALL.set(Errors())

    def account(self) -> str:
        errors = OF_CALL.get(Errors())
        return errors.flaw or (f"answered HTTP {errors.status}" if errors.status else "")

    def last_words(self) -> str:
        return ""

    async def _watch(self, response: httpx2.Response) -> None:
        if response.status_code >= 400 and response.request.method == "POST":
            OF_CALL.get(Errors()).status = response.status_code

    def _note(self, why: str) -> None:
        OF_CALL.get(Errors()).flaw = why


async def _be_patient(request: httpx2.Request) -> None:
    """The stream of unrequested server messages may stay silent without a time limit."""
    if request.method == "GET":
        request.extensions["timeout"] = {**request.extensions["timeout"], "read": None}


@cache
def _certificates() -> ssl.SSLContext:
    """Cached: reading them takes 40 ms, most of the cost of a session."""
    import httpx2

    return httpx2.create_ssl_context()
