"""Agents for tests, as their users would write them: httpx alone, chat completions and MCP by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import Any

import httpx

from tasks.core.records import Problem
from tasks.tools.driven import Endpoint

TIMEOUT = httpx.Timeout(300)


class Client:
    def __init__(self, endpoint: Endpoint, http: httpx.AsyncClient):
        self.endpoint, self.http = endpoint, http
        self.headers = {"authorization": f"Bearer {endpoint.key}", "accept": "application/json, text/event-stream"}
        self.numbers = itertools.count()

    async def tools(self) -> list[dict[str, Any]]:
        listed = (await self.rpc("tools/list", {}))["tools"]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"],
                },
            }
            for tool in listed
        ]  # fmt: skip

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self.rpc("tools/call", {"name": name, "arguments": arguments})
        return str(result["content"][0]["text"])

    async def rpc(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": next(self.numbers), "method": method, "params": params}
        answer = await self.http.post(self.endpoint.mcp_url, json=message, headers=self.headers)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["result"]
        return found

    async def ask(self, messages: list[Any], tools: list[Any] | None = None, **further: Any) -> dict[str, Any]:
        """The assistant's message; httpx.HTTPStatusError for an error of the endpoint."""
        body = {"model": self.endpoint.model, "messages": messages, **({"tools": tools} if tools else {}), **further}
        answer = await self.http.post(f"{self.endpoint.openai_url}/chat/completions", json=body, headers=self.headers)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["error"])
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message


class Refused(Exception):
    def __init__(self, status: int, error: dict[str, Any]):
        super().__init__(f"{status}: {error['message']}")
        self.status, self.error = status, error


async def play(problem: Problem, endpoint: Endpoint) -> None:
    """The loop of every agent: ask, call, ask again, until an answer has no call."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as http:
        client = Client(endpoint, http)
        tools = await client.tools()
        messages: list[Any] = [{"role": "user", "content": problem.requests[0]}]
        while True:
            message = await client.ask(messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                function = call["function"]
                text = await client.call(function["name"], json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def main() -> None:
    """As a program: what it needs is in its environment."""
    with open(os.environ["TURNWISE_PROBLEM"], encoding="utf-8") as file:
        problem = Problem.model_validate(json.load(file))
    given = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "TURNWISE_MCP_URL", "OPENAI_API_KEY", "TURNWISE_MODEL")
    asyncio.run(play(problem, Endpoint(*(os.environ[name] for name in given))))


if __name__ == "__main__":
    main()
