"""`/mcp`: the tools of the key's episode over the Model Context Protocol (streamable HTTP, the official SDK).

It is stateless: the key says which episode, so no session outlives a request, and there is no stream to listen on. An
error reply of a tool is a result with `isError`, which the agent may recover from; a fault of ours is an MCP error.
Output schemas are not told: replies are text, and clients refuse tools that declare more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    TextContent,
    ToolAnnotations,
)
from mcp.types import Tool as ToolOfMCP
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tasks.gateway.completions import ProtocolError, ToolHost
from tasks.gateway.http_io import MAX_BODY_BYTES, Refusals, key_of
from tasks.gateway.protocols import chat
from tasks.gateway.waiting import Waiting, told
from tasks.tools.base import Tool, ToolReply


class ToolEndpoint:
    """An ASGI app; `run` is around its life. `closing` is set when the gateway closes."""

    def __init__(self, host: ToolHost, closing: asyncio.Event, refusals: Refusals):
        self.host, self.closing, self.refusals = host, closing, refusals
        server = Server[dict[str, Any]]("turnwise", on_list_tools=self._list, on_call_tool=self._call)
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=MAX_BODY_BYTES
        )

    def run(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            told(lambda: self.host.tools(key_of(request)))
            if request.method != "POST":
                raise ProtocolError(405, "There is no session and no stream to listen on; use POST.")
        except ProtocolError as error:
            return await self.refusals.reply(chat, error)(scope, receive, send)
        return await self._manager.handle_request(scope, receive, send)

    async def _list(self, context: Any, _: Any) -> ListToolsResult:
        try:
            tools = told(lambda: self.host.tools(key_of(context.request)))
        except ProtocolError as error:  # the endpoint has refused a wrong key already: the episode has just ended
            raise MCPError(INTERNAL_ERROR, error.message) from None
        return ListToolsResult(tools=[_tool_of_mcp(tool) for tool in tools])

    async def _call(self, context: Any, called: CallToolRequestParams) -> CallToolResult:
        key, arguments = key_of(context.request), called.arguments or {}
        reply = await self._reply(key, called.name, arguments)
        is_error = reply.error is not None or not reply.valid
        return CallToolResult(content=[TextContent(type="text", text=reply.text)], is_error=is_error)

    async def _reply(self, key: str, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        waiting = None
        try:
            waiting = Waiting(told(lambda: self.host.call(key, name, arguments)), self.closing)
            return await waiting.whole()
        except ProtocolError as error:
            raise MCPError(INTERNAL_ERROR, error.message) from None
        finally:
            if waiting is not None:
                waiting.stop()


def _tool_of_mcp(tool: Tool) -> ToolOfMCP:
    hints = ToolAnnotations(read_only_hint=tool.read_only, idempotent_hint=tool.idempotent)
    return ToolOfMCP(
        name=tool.name, description=tool.description, input_schema=dict(tool.parameters), annotations=hints
    )
