"""What HTTP has beside the protocols: a request's key, its body within bounds, and the reply that refuses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tasks.core import json_text
from tasks.gateway.completions import ProtocolError
from tasks.gateway.wire import WireProtocol

MAX_BODY_BYTES = 8 << 20
DRAINED_BODIES = 8  # of the largest size: a body that is too large is read on, so that its sender gets an answer


def key_of(request: Request) -> str:
    """The bearer key, as OpenAI's clients send it, or `x-api-key`, as Anthropic's do; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request) -> bytes:
    """ProtocolError 413 above MAX_BODY_BYTES. ClientDisconnect if the sender hangs up."""
    pieces, num_bytes = list[bytes](), 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes <= MAX_BODY_BYTES:
            pieces.append(piece)
        elif num_bytes > DRAINED_BODIES * MAX_BODY_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        message = f"The body is larger than {MAX_BODY_BYTES:,} bytes; send a shorter history."
        raise ProtocolError(413, message, code="request_too_large")
    return b"".join(pieces)


def as_object(body: bytes) -> dict[str, Any]:
    """ProtocolError 400 unless the body is one JSON object that a file can contain."""
    try:
        value = json_text.parse(body)
        json_text.check_writable(value)
    except ValueError as error:
        raise ProtocolError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ProtocolError(400, "The body is JSON, but not an object.", code="invalid_json")
    return value


@dataclass(slots=True)
class Refusals:
    """Writes and counts the errors of one gateway; `last` is the last one's status and code: its message may quote
    the request.
    """

    num: int = 0
    last: str | None = None

    def note(self, error: ProtocolError) -> None:
        self.num += 1
        self.last = f"{error.status} {error.code or ''}".rstrip()

    def reply(self, protocol: WireProtocol, error: ProtocolError) -> Response:
        """Clients would ask again after 409 and 429; only a server that is full or closing answers otherwise then."""
        self.note(error)
        again = error.status in (429, 503)
        return JSONResponse(protocol.error(error), error.status, {"x-should-retry": "true" if again else "false"})
