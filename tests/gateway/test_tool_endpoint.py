"""The tools of an episode over MCP, asked with the official client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from tasks.gateway.server import Gateway
from tasks.tools.base import ToolReply
from tests.gateway.scripted import KEY, PRICE, ScriptedBackend, ScriptedHost, turn


def visit(gateway: Gateway, do: Callable[[ClientSession], Awaitable[Any]]) -> Any:
    async def connect() -> Any:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client,
            streamable_http_client(gateway.mcp_url, http_client=client) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            return await do(session)

    return asyncio.run(connect())


def test_an_agent_lists_the_tools_of_its_episode_and_calls_them(gateway):
    async def shop(session: ClientSession):
        listed = await session.list_tools()
        return listed.tools, *[await session.call_tool("price", {"room": room}) for room in ("attic", "cellar")]

    tools, attic, cellar = visit(gateway, shop)
    assert [(tool.name, tool.description, tool.input_schema) for tool in tools] == [
        (PRICE.name, PRICE.description, PRICE.parameters)
    ]
    assert (attic.content[0].text, attic.is_error) == ("attic: 40", False)
    assert ("not_found" in cellar.content[0].text, cellar.is_error) == (True, True)


def test_a_fault_of_the_tool_is_an_error_of_the_protocol_and_a_wrong_key_is_401(gateway):
    assert "KeyError" in refused(gateway, {})  # the scripted tool fails without a room

    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    reply = httpx2.post(gateway.mcp_url, json=ping, headers={"Authorization": "Bearer another"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx2.get(gateway.mcp_url, headers={"x-api-key": KEY}).status_code == 405


def test_a_gateway_that_closes_lets_no_call_wait():
    class Silent(ScriptedHost):
        answer: Future[ToolReply] = Future()

        def call(self, key, name, arguments):
            threading.Thread(target=gateway.close).start()
            return self.answer

    gateway = Gateway(ScriptedBackend(lambda request: turn("")), tools=Silent())
    gateway.start()
    assert "closing" in refused(gateway, {"room": "attic"})
    assert Silent.answer.cancelled()


def refused(gateway: Gateway, arguments: dict[str, Any]) -> str:
    """The words of the MCP error that a call of `price` ends with."""

    async def call(session: ClientSession) -> str:
        with pytest.raises(MCPError) as raised:
            await session.call_tool("price", arguments)
        return raised.value.message

    return visit(gateway, call)
