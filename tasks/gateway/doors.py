"""Who may come in where no key is asked for: programs of this machine, and no web page that its browser shows.

A page may have a browser post to the loopback without a question, and read the answer once its own name leads there
(DNS rebinding). The first carries its Origin, or a body that is no JSON; the second has the page's name as Host.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.gateway.completions import ProtocolError
from tasks.gateway.http_io import Refusals
from tasks.gateway.protocols import chat, messages, responses
from tasks.gateway.wire import WireProtocol

PROTOCOLS: dict[str, WireProtocol] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


class LocalDoor:
    """An ASGI app around another."""

    def __init__(self, inner: ASGIApp, refusals: Refusals):
        self.inner, self.refusals = inner, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                refuse_strangers(request)
            except ProtocolError as error:
                return await self.refusals.reply(protocol_of(request), error)(scope, receive, send)
        return await self.inner(scope, receive, send)


def refuse_strangers(request: Request) -> None:
    """ProtocolError 403 or 415, which says what to do."""
    host, origin = request.headers.get("host"), request.headers.get("origin")
    if host is not None and not _is_this_machine(f"//{host}"):
        raise _refused(403, f"The Host {host!r:.100} is not this machine; ask 127.0.0.1 or localhost", "foreign_host")
    if origin is not None and not _is_this_machine(origin):
        told = f"A page of {origin!r:.100} may not ask a server without a key; ask from a program"
        raise _refused(403, told, "foreign_origin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and request.url.path in PROTOCOLS and kind != "application/json":
        told = f"The Content-Type is {kind!r:.100}; send application/json"
        raise _refused(415, told, "unsupported_media_type")


def protocol_of(request: Request) -> WireProtocol:
    """In whose shape an error is told, of a path that is none of theirs too."""
    path = request.url.path
    if path.startswith("/v1/messages/") or (path not in PROTOCOLS and "anthropic-version" in request.headers):
        return messages
    return PROTOCOLS.get(path, chat)


def _refused(status: int, told: str, code: str) -> ProtocolError:
    return ProtocolError(status, f"{told}, or have the server ask for a key (serve.key_variable).", code=code)


def _is_this_machine(address: str) -> bool:
    try:
        name = urlsplit(address).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:  # another name, or none
        return False
