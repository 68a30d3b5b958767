"""One episode at an OpenEnv server: a WebSocket, on which the server answers each message by one.

The protocol has no numbers on messages. So a message that nobody asked for, and an answer that came too late, would be
taken for the answer to the next question: either ends the session, and with it the episode, by an EnvironmentFault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tasks.core.secrets import Secrets
from tasks.core.text import one_line
from tasks.environments.openenv.messages import (
    MAX_MESSAGE_BYTES,
    BadAnswer,
    Message,
    Observed,
    fault_of,
    read,
    read_message,
    refusal_of,
)
from tasks.tools.base import EnvironmentFault, FaultType

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection, connect

CLOSE_SECONDS = 2.0
Reason = Callable[[], Awaitable[str]]  # why a connection may have ended, to follow "the server"; empty if unknown


class Session:
    def __init__(self, url: str, headers: Mapping[str, str], secrets: Secrets, *, is_ours: bool, reason: Reason):
        self.url, self.headers, self.secrets, self.is_ours, self.reason = url, dict(headers), secrets, is_ours, reason
        self.flaw, self.flaw_type, self.has_timed_out = "", "unavailable", False
        self._socket: ClientConnection | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[Message] | None = None

    async def open(self, *, seconds: float) -> None:
        """EnvironmentFault if the server cannot be reached."""
        from websockets.exceptions import WebSocketException

        address = f"ws{self.url.removeprefix('http').rstrip('/')}/ws"
        try:
            self._socket = await _connect_class()(
                address,
                additional_headers=self.headers,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,  # a packed message may be a bomb
                proxy=None if self.is_ours else True,
                open_timeout=seconds,
                ping_interval=None,  # a step may block the server's loop; each has its own limit
                close_timeout=CLOSE_SECONDS,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            why = await self.reason() or f"could not be reached: {type(error).__name__}: {error}"
            raise EnvironmentFault(f"the server {one_line(self.secrets.hide(why))}", tool="server") from None
        self._listener = asyncio.create_task(self._listen(self._socket))

    async def reset(self, arguments: Mapping[str, Any], *, seconds: float) -> Observed:
        return await self._observe("reset", arguments, tool="reset", seconds=seconds)

    async def step(self, action: Mapping[str, Any], *, tool: str, seconds: float) -> Observed:
        return await self._observe("step", action, tool=tool, seconds=seconds)

    async def ask_mcp(self, method: str, params: Mapping[str, Any], *, tool: str, seconds: float) -> dict[str, Any]:
        """The JSON-RPC reply, which has a result or an error."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(params)}
        return (await self._ask("mcp", request, expected="mcp", tool=tool, seconds=seconds)).data

    async def close(self) -> None:
        """Ask the server to end the session and wait until it has, so that its place is free for the next."""
        if self._socket is None:
            return
        if not self.flaw:
            with suppress(Exception):
                await self._socket.send(json.dumps({"type": "close"}))
                await asyncio.wait_for(self._socket.wait_closed(), CLOSE_SECONDS)
        self.flaw = self.flaw or "was asked after the end of its session"
        await self._socket.close()
        assert self._listener is not None
        await asyncio.wait({self._listener}, timeout=CLOSE_SECONDS)

    async def _observe(self, type: str, data: Mapping[str, Any], *, tool: str, seconds: float) -> Observed:
        message = await self._ask(type, data, expected="observation", tool=tool, seconds=seconds)
        try:
            observed: Observed = read(Observed, message.data, "an observation")
        except BadAnswer as error:
            self.flaw = str(error)
            raise await self._fault(tool) from None
        return observed

    async def _ask(self, type: str, data: Mapping[str, Any], *, expected: str, tool: str, seconds: float) -> Message:
        if self.flaw or self._socket is None:
            raise await self._fault(tool)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send(json.dumps({"type": type, "data": dict(data)}))
                message = await self._answer
        except TimeoutError:
            self.has_timed_out = True
            self.flaw, self.flaw_type = f"did not answer in {seconds:g} s", "timeout"
            raise await self._fault(tool) from None
        except Exception:  # the connection ended, of which the listener knows more
            assert self._listener is not None
            await asyncio.wait({self._listener}, timeout=CLOSE_SECONDS)
            raise await self._fault(tool) from None
        finally:
            self._answer = None
        if message.type == "error":
            raise self._failure(type, message, tool)
        if message.type != expected:
            self.flaw = f"answered {type} with {message.type}"
            raise await self._fault(tool)
        return message

    async def _listen(self, socket: ClientConnection) -> None:
        """Hand each answer to whoever waits; the first message that is none ends the session."""
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                message = read_message(await socket.recv(), self.secrets)
                if self._answer is None or self._answer.done():
                    told = f": {fault_of(message.data, 'server').message}" if message.type == "error" else ""
                    raise BadAnswer(f"sent a message that nobody asked for{told}")
                self._answer.set_result(message)
        except BadAnswer as error:
            self.flaw = self.flaw or str(error)
        except ConnectionClosed as error:
            is_too_long = error.sent is not None and error.sent.code == 1009
            limit = f"sent a message of more than {MAX_MESSAGE_BYTES >> 20} MB"
            self.flaw = self.flaw or (limit if is_too_long else "closed the connection")
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(self.flaw))
        await socket.close()

    async def _fault(self, tool: str) -> EnvironmentFault:
        why = await self.reason() if self.flaw == "closed the connection" else ""
        type: FaultType = "timeout" if self.flaw_type == "timeout" else "unavailable"
        return EnvironmentFault(f"the server {one_line(why or self.flaw)}", tool=tool, type=type)

    def _failure(self, asked: str, message: Message, tool: str) -> Exception:
        try:
            return (refusal_of(message.data) if asked == "step" else None) or fault_of(message.data, tool)
        except BadAnswer as error:
            return EnvironmentFault(f"the server {error}", tool=tool)


def _connect_class() -> type[connect]:
    """The library's own, without redirects, which could lead to a server on this machine."""
    from websockets.asyncio.client import connect

    class Connect(connect):
        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    return Connect
