"""One session with an MCP server: opened, called, checked and ended, on the event loop.

Each session has its own task, since the task that entered the SDK's scopes must leave them; calls come from other
tasks. If a server dies, hangs, floods its output, breaks the protocol or changes its tools, the caller gets an
EnvironmentFault that says so and quotes the server, without secrets.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.core.secrets import Secrets
from tasks.core.text import one_line, printable
from tasks.environments.mcp.connector import Connector
from tasks.environments.mcp.messages import (
    INVALID_PARAMS,
    UNKNOWN_TOOL,
    BadListing,
    Listing,
    Read,
    error_type,
    is_of_the_call,
    read_listing,
    result_text,
)
from tasks.tools.base import EnvironmentFault, FaultType
from tasks.tools.layer import ToolError, as_json

if TYPE_CHECKING:
    from mcp import ClientSession, types
    from mcp.shared.exceptions import MCPError

CLOSE_SECONDS = 8.0  # until a session has ended, whatever its server does
ACCOUNT_SECONDS = 3.0  # to learn why a server died, for the message
MAX_PAGES = 100  # of a list of tools
MAX_SAID = 300  # characters of a server's log in a fault
MAX_LOG_LINES = 3
ERROR = re.compile(r"[\w.]{0,60}(?:Error|Exception)\b")
FAULT_OF_STATUS: dict[int, FaultType] = {408: "timeout", 429: "rate_limited", 504: "timeout"}
NOT_FOUND = 404  # the server no longer knows the session; what it was asked before, it may still answer


class Session:
    """One connection; `check` raises if the listed tools are not the expected ones. It is not clean after a call
    without an answer: the server may still be working on it; `has_timed_out` if one got none in time.
    """

    def __init__(
        self, connector: Connector, secrets: Secrets, *, start_timeout_seconds: float, check: Callable[[Listing], None]
    ):
        self.connector, self.secrets, self.check = connector, secrets, check
        self.start_timeout_seconds = start_timeout_seconds
        self.began = time.monotonic()
        self.start_seconds: float | None = None
        self.has_timed_out = False
        self._num_unanswered = self._num_under_way = 0
        self._is_forgotten = False
        self._listing: Listing | None = None
        self._tools_may_have_changed = False
        self._client: ClientSession | None = None
        self._error = ""
        self._stop = asyncio.Event()
        self._opened = asyncio.Event()
        self.connector.forget()  # before its task begins, whose errors `open` tells
        self._owner = asyncio.create_task(self._own())

    @property
    def is_alive(self) -> bool:
        return self._is_connected and not self._is_forgotten

    @property
    def _is_connected(self) -> bool:
        return self._client is not None and self.connector.is_alive and not self._stop.is_set()

    @property
    def is_awaited(self) -> bool:
        """Whether a server that forgot the session still owes answers to others."""
        return self._is_forgotten and self._num_under_way > 0

    @property
    def is_clean(self) -> bool:
        return self._num_unanswered == 0

    @property
    def listing(self) -> Listing:
        assert self._listing is not None, "it was not opened"
        return self._listing

    async def open(self) -> None:
        """Wait until it is usable. EnvironmentFault if the server does not start or has other tools."""
        opened = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait({opened, self._owner}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if not self._opened.is_set():
            raise self._fault("server", self._account())
        self.start_seconds = time.monotonic() - self.began
        self.check(self.listing)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_seconds: float, read: Read = result_text
    ) -> str:
        """A tool's answer. ToolError if the tool refused the call, EnvironmentFault if it could not answer."""
        from mcp.shared.exceptions import MCPError

        payload = as_json(arguments)
        if self._tools_may_have_changed:
            await self.check_tools()
        if self._client is None or not self.is_alive:
            raise await self._lost(name)
        self.connector.forget()
        self._num_unanswered += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                result = await self._ask(self._client, name, payload)
        except TimeoutError:
            self.has_timed_out = True
            raise EnvironmentFault(f"no answer in {timeout_seconds:g} s", tool=name, type="timeout") from None
        except MCPError as error:
            raise await self._after(error, name) from None
        except Exception as error:  # not a valid result
            if not self._is_connected:
                raise await self._lost(name) from None
            raise self._fault(name, f"breaks the protocol: {error}") from None
        self._num_unanswered -= 1
        text = self.secrets.hide(read(result))
        if not result.is_error:
            return text
        if UNKNOWN_TOOL.search(text):
            await self.check_tools()
        raise ToolError(error_type(text), text)

    async def check_tools(self) -> None:
        from mcp.shared.exceptions import MCPError

        if self._client is None or not self.is_alive:
            raise await self._lost("server")
        self._tools_may_have_changed = False
        self.connector.forget()
        try:
            async with asyncio.timeout(self.start_timeout_seconds):
                self._listing = await self._list(self._client)
        except TimeoutError:
            raise self._fault(
                "server", f"did not list its tools within {self.start_timeout_seconds:g} s", "timeout"
            ) from None
        except MCPError as error:
            raise await self._after(error, "server") from None
        except Exception as error:
            raise self._fault("server", _in_words(error)) from None
        self.check(self._listing)

    async def _ask(self, client: ClientSession, name: str, payload: dict[str, Any]) -> types.CallToolResult:
        self._num_under_way += 1
        try:
            return await client.call_tool(name, payload)
        finally:
            self._num_under_way -= 1
            if self._is_forgotten and not self._num_under_way:
                self._stop.set()

    async def wait_until_over(self) -> None:
        await asyncio.wait({self._owner})

    async def close(self) -> None:
        self._stop.set()
        await asyncio.wait({self._owner}, timeout=CLOSE_SECONDS + 1)

    async def _own(self) -> None:
        """Enter the connection, keep it until it stops or breaks, and leave it."""
        _quieten()
        try:
            async with (
                asyncio.timeout(None) as end,
                self.connector.connect() as (incoming, outgoing),
                _client_class()(incoming, outgoing, message_handler=self._hear) as client,
            ):
                try:
                    await self._start(client)
                    await self._stop.wait()
                finally:
                    self._client = None
                    end.reschedule(asyncio.get_running_loop().time() + CLOSE_SECONDS)
        except BaseException as error:
            self._error = self._error or _in_words(error)

    async def _start(self, client: ClientSession) -> None:
        try:
            async with asyncio.timeout(self.start_timeout_seconds):
                await _shake_hands(client)
                self._listing = await self._list(client)
        except TimeoutError:
            self._error = f"did not answer within {self.start_timeout_seconds:g} s of its start"
            raise
        self._client = client
        self._opened.set()

    async def _list(self, client: ClientSession) -> Listing:
        from mcp import types

        tools: list[types.Tool] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return read_listing(client.server_info, tools, self.secrets)
        raise BadListing(f"lists its tools on more than {MAX_PAGES} pages")

    async def _hear(self, message: Any) -> None:
        from mcp import types

        if isinstance(message, types.ToolListChangedNotification):
            self._tools_may_have_changed = True

    async def _after(self, error: MCPError, tool: str) -> Exception:
        from mcp.types import CONNECTION_CLOSED

        status = self.connector.status
        self._is_forgotten = self._is_forgotten or status == NOT_FOUND
        if error.code == CONNECTION_CLOSED or status == NOT_FOUND or not self._is_connected:
            return await self._lost(tool, error.message)
        if tool != "server" and is_of_the_call(error.code, error.message, status):
            return await self._refusal(error)
        type = FAULT_OF_STATUS.get(status, "unavailable")
        return self._fault(tool, self.connector.account() or f"answered: {error.message}", type)

    async def _refusal(self, error: MCPError) -> ToolError:
        """The server's answer to the call, as a result with `isError` is. EnvironmentFault if the tool is gone."""
        self._num_unanswered -= 1
        text = self.secrets.hide(error.message) or "the call failed"
        if error.code == INVALID_PARAMS or UNKNOWN_TOOL.search(text):
            await self.check_tools()
        return ToolError("invalid_arguments" if error.code == INVALID_PARAMS else error_type(text), text)

    async def _lost(self, tool: str, message: str = "") -> EnvironmentFault:
        """The fault of a lost connection; waits briefly for the reason, which others who share it are told too."""
        self._error = self._error or self.connector.account()
        if self.is_awaited:
            return self._fault(tool, self._account())
        self._stop.set()
        await asyncio.wait({self._owner}, timeout=ACCOUNT_SECONDS)
        return self._fault(tool, self._account() or f"closed the connection: {message}")

    def _account(self) -> str:
        return self.connector.account() or self._error

    def _fault(self, tool: str, message: str, type: FaultType = "unavailable") -> EnvironmentFault:
        log = [line.strip() for line in self.secrets.hide(self.connector.last_words()).splitlines() if line.strip()]
        said = f"; it last logged: {_in_short(log)}" if log else ""
        line = f"the server {one_line(self.secrets.hide(message))}{printable(said)}"
        return EnvironmentFault(line, tool=tool, type=type)


def _client_class() -> type[ClientSession]:
    """The SDK's client without its check of results against output schemas. That check runs on the event loop in pure
    Python, with a schema and a value from the server: a backtracking pattern or a doubling `allOf` would block the
    process for ever. The model never reads that schema.
    """
    from mcp import ClientSession

    class Client(ClientSession):
        async def validate_tool_result(self, name: str, result: types.CallToolResult) -> None:
            pass

    return Client


async def _shake_hands(client: ClientSession) -> None:
    """The handshake of 2025, with state, which every server knows; if refused, the sessionless one of 2026."""
    from mcp.shared.exceptions import MCPError
    from mcp.types import CONNECTION_CLOSED

    try:
        await client.initialize()
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise
        await client.discover()


def _in_words(error: BaseException) -> str:
    """Why a connection ended, to follow "the server"."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, BadListing) else f"could not be used: {type(error).__name__}: {error}"


def _quieten() -> None:
    """The SDK logs unreadable messages in full: endless, or with secrets."""
    for name in ("mcp", "client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _in_short(log: Sequence[str]) -> str:
    """Its last lines; before them the first that names an error, after which Node writes more than they are."""
    end = " | ".join(log[-MAX_LOG_LINES:])
    error = next((line for line in log[:-MAX_LOG_LINES] if ERROR.match(line)), None)
    end = end if len(end) <= MAX_SAID else f"…{end[-MAX_SAID:]}"
    return end if error is None else f"{error[:MAX_SAID]} … {end}"
