"""One protocol's endpoint: from a request to the Backend, and its turn back, whole or as a stream.

A turn takes as long as it takes. A stream begins when the turn is written or `keep_alive_seconds` have passed, so that
an error has its own status wherever it can; from then on comments say that the connection is alive. An agent that hangs
up cancels its turn; a gateway that closes answers those who wait with status 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from string import punctuation
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tasks.gateway.completions import Backend, Completion, ProtocolError
from tasks.gateway.http_io import Refusals, as_object, key_of, read_body
from tasks.gateway.waiting import HungUp, Waiting, told
from tasks.gateway.wire import Asked, WireProtocol

ASCII = punctuation.replace("%", "")
VERSION_HEADER = "x-turnwise-version"
IGNORED_HEADER = "x-turnwise-ignored"  # parameters of the request of which the model's own are used
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


@dataclass(frozen=True, slots=True)
class TurnEndpoint:
    """An ASGI app. `closing` is set when the gateway closes."""

    protocol: WireProtocol
    backend: Backend
    closing: asyncio.Event
    refusals: Refusals
    keep_alive_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            asked, turn = await self._ask(request)
            waiting = Waiting(turn, self.closing, _hang_up(request))
            try:
                if asked.stream:
                    return await self._stream(asked, waiting, send)
                response = self._response(asked, await waiting.whole())
            finally:
                waiting.stop()
        except ProtocolError as error:
            response = self.refusals.reply(self.protocol, error)
        except (HungUp, ClientDisconnect):
            return None
        return await response(scope, receive, send)

    async def _ask(self, request: Request) -> tuple[Asked, Future[Completion]]:
        key = key_of(request)
        names = told(lambda: self.backend.models(key))
        if request.method != "POST":
            raise ProtocolError(405, f"{request.url.path} is asked with POST.", code="method_not_allowed")
        asked = self.protocol.read(as_object(await read_body(request)))
        check_model(asked.request.model, names)
        return asked, told(lambda: self.backend.complete(key, asked.request))

    def _response(self, asked: Asked, completion: Completion) -> Response:
        return JSONResponse(told(lambda: self.protocol.write(asked, completion)), headers=_headers(completion))

    async def _stream(self, asked: Asked, waiting: Waiting[Completion], send: Send) -> None:
        """ProtocolError, if it is raised, is raised before the first byte."""
        completion = await waiting.result(timeout_seconds=self.keep_alive_seconds)
        told_first = _headers(completion) if completion else {}
        headers = [*STREAM_HEADERS, *((name.encode(), value.encode()) for name, value in told_first.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while completion is None:
                await _send_piece(send, b": the turn is being written\n\n")
                completion = await waiting.result(timeout_seconds=self.keep_alive_seconds)
            for name, value in _headers(completion).items():
                await _send_piece(send, f": {name}: {value}\n\n".encode())
            for event in self.protocol.events(asked, completion):
                await _send_piece(send, event.encode())
        except ProtocolError as error:
            self.refusals.note(error)
            await _send_piece(send, self.protocol.error_event(error).encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_model(name: str, names: Sequence[str]) -> None:
    """ProtocolError 404 for a model that is none of `names`."""
    if name not in names:
        message = f"The model {name!r:.100} is not served; this key may use {', '.join(names)}."
        raise ProtocolError(404, message, parameter="model", code="model_not_found")


def _headers(completion: Completion) -> dict[str, str]:
    """What a reply says beside its turn, in every protocol."""
    ignored = {IGNORED_HEADER: ", ".join(completion.ignored)} if completion.ignored else {}
    return {VERSION_HEADER: _in_a_header(completion.version), **ignored}


def _in_a_header(version: str) -> str:
    """ASCII as it is; letters, spaces and line ends that no header may have are percent-encoded."""
    return quote(version, safe=ASCII)


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
