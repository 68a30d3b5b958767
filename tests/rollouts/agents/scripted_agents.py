"""Agents for tests, as their users would write them: httpx alone, chat completions and MCP by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import httpx

from tasks.core.records import Problem
from tasks.tools.driven import AgentTask, Endpoint

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


async def play(task: AgentTask, endpoint: Endpoint) -> None:
    """The loop of every agent: ask, call, ask again, until an answer has no call."""
    async with httpx.AsyncClient(verify=False, timeout=TIMEOUT) as http:
        client = Client(endpoint, http)
        tools = await client.tools()
        messages: list[Any] = [{"role": "user", "content": task.requests[0]}]
        while True:
            message = await client.ask(messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                function = call["function"]
                text = await client.call(function["name"], json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def with_client(endpoint: Endpoint, use: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async with httpx.AsyncClient(verify=False, timeout=TIMEOUT, limits=httpx.Limits(max_connections=100)) as http:
        await use(Client(endpoint, http))


MEETING = threading.Barrier(64)


async def meets_63_others(task: AgentTask, endpoint: Endpoint) -> None:
    await asyncio.to_thread(MEETING.wait, 120)
    await play(task, endpoint)


async def calls_on_its_own(task: AgentTask, endpoint: Endpoint) -> None:
    """What no turn of the policy asked for; then it plays."""

    async def use(client: Client) -> None:
        await client.call("no_such_tool", {})

    await with_client(endpoint, use)
    await play(task, endpoint)


async def crashes(task: AgentTask, endpoint: Endpoint) -> None:
    raise KeyError("no such flight")


async def hangs(task: AgentTask, endpoint: Endpoint) -> None:
    await asyncio.sleep(600)


async def never_asks(task: AgentTask, endpoint: Endpoint) -> None:
    """It is done at once."""


async def floods(task: AgentTask, endpoint: Endpoint) -> None:
    """10 MB, then a thousand requests at once; then it plays."""

    async def use(client: Client) -> None:
        said = await told(client.ask([user("x" * (10 << 20))]))
        assert said.status == 413, said
        many = await asyncio.gather(*(told(client.ask([user(f"No. {number}")])) for number in range(1000)))
        assert {item.status for item in many} <= {200, 400, 429}, many
        assert any(item.status == 429 for item in many)

    await with_client(endpoint, use)


async def uses_another_key(task: AgentTask, endpoint: Endpoint) -> None:
    stranger = dataclasses.replace(endpoint, key="sk-of-somebody-else")

    async def use(client: Client) -> None:
        said = await told(client.ask([user(task.requests[0])]))
        assert said.status == 401, said

    await with_client(stranger, use)
    await play(task, endpoint)


async def edits_its_history(task: AgentTask, endpoint: Endpoint) -> None:
    async def use(client: Client) -> None:
        messages, tools = [user(task.requests[0])], await client.tools()
        first = await client.ask(messages, tools)
        call = first["tool_calls"][0]["id"]
        second = await client.ask([*messages, first, reply(call, "It is free.")], tools)
        assert second["tool_calls"][0]["id"] != call
        await client.ask([*messages, first, reply(call, "It is taken.")], tools)

    await with_client(endpoint, use)


async def goes_on_with_another_history(task: AgentTask, endpoint: Endpoint) -> None:
    async def use(client: Client) -> None:
        first = await client.ask([user(task.requests[0])], tool_choice="none")
        await client.ask([user(f"{task.requests[0]} Please."), first, user("Again.")])

    await with_client(endpoint, use)


async def asks_thrice_at_once(task: AgentTask, endpoint: Endpoint) -> None:
    async def use(client: Client) -> None:
        messages, tools = [user(task.requests[0])], await client.tools()
        one, *others = await asyncio.gather(*(client.ask(messages, tools) for _ in range(3)))
        assert all(other["tool_calls"][0]["function"] == one["tool_calls"][0]["function"] for other in others)

    await with_client(endpoint, use)


async def asks_for_too_much(task: AgentTask, endpoint: Endpoint) -> None:
    """What cannot be honoured is an error; what can is; then it plays."""

    async def use(client: Client) -> None:
        messages = [user(task.requests[0])]
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        assert (await told(client.ask(messages, response_format=schema))).status == 400
        assert (await told(client.ask([user("Hi."), {"role": "assistant", "content": "Hi."}]))).status == 400
        assert (await told(client.ask(messages, model="gpt-unknown"))).status == 404
        tools = await client.tools()
        message = await client.ask(messages, tools, tool_choice="none", temperature=0.1)
        assert "<tool_call>" in message["content"] and not message.get("tool_calls")
        cut = await client.ask([*messages, message, user("Again.")], tools, tool_choice="none", stop=['"arguments"'])
        assert cut["content"].endswith('", ')
        await client.ask([*messages, message, user("Again."), cut, user("Once more.")], tools, max_tokens=3)

    await with_client(endpoint, use)


async def sets_its_own_distribution(task: AgentTask, endpoint: Endpoint) -> None:
    async def use(client: Client) -> None:
        await client.ask([user(task.requests[0])], temperature=0.25, top_p=1.0, seed=20261129)

    await with_client(endpoint, use)


async def stops_at_a_word(task: AgentTask, endpoint: Endpoint) -> None:
    async def use(client: Client) -> None:
        answer = await client.ask([user(task.requests[0])], stop=["B12"])
        assert answer["content"] == "It is ", answer

    await with_client(endpoint, use)


async def answers_for_itself(task: AgentTask, endpoint: Endpoint) -> dict[str, Any]:
    await play(task, endpoint)
    return {"success": True, "answer": "It is done.", "details": {"tickets": 2}}


async def gives_up_and_asks_again(task: AgentTask, endpoint: Endpoint) -> None:
    """As clients do by themselves whose timeout is shorter than a turn."""
    await with_client(endpoint, lambda client: _give_up(client, task.requests[0], then=task.requests[0]))


async def gives_up(task: AgentTask, endpoint: Endpoint) -> None:
    """And asks something else."""
    await with_client(endpoint, lambda client: _give_up(client, task.requests[0], then=f"{task.requests[0]} Please."))


async def _give_up(client: Client, request: str, *, then: str) -> None:
    client.http.timeout = httpx.Timeout(0.5)
    with contextlib.suppress(httpx.ReadTimeout):
        await client.ask([user(request)])
    client.http.timeout = TIMEOUT
    await client.ask([user(then)])


async def answers_its_own_calls(task: AgentTask, endpoint: Endpoint) -> str:
    """Its tool declines, its user asks on, and it lies."""

    async def use(client: Client) -> None:
        messages: list[Any] = [user(task.requests[0])]
        messages.append(await client.ask(messages, PAYING))
        messages.append(reply(messages[-1]["tool_calls"][0]["id"], "DECLINED: the card has no money"))
        messages.append(await client.ask(messages, PAYING))
        messages.append(user("Is it paid?"))
        await client.ask(messages, PAYING)

    await with_client(endpoint, use)
    return "All is paid."


PAYING = [{"type": "function", "function": {"name": "pay", "description": "Pay.", "parameters": {"type": "object"}}}]


def check(problem: Problem, result: dict[str, Any], final_message: str | None) -> dict[str, bool]:
    return {"asked": problem.requests != [], "told": final_message == result["answer"]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


class Told(NamedTuple):
    status: int
    message: str


async def told(asked: Coroutine[Any, Any, Any]) -> Told:
    try:
        return Told(200, str(await asked))
    except Refused as refused:
        return Told(refused.status, str(refused))


def main() -> None:
    """As a program: what it needs is in its environment."""
    with open(os.environ["TURNWISE_PROBLEM"], encoding="utf-8") as file:
        task = AgentTask.model_validate(json.load(file))
    given = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "TURNWISE_MCP_URL", "OPENAI_API_KEY", "TURNWISE_MODEL")
    asyncio.run(play(task, Endpoint(*(os.environ[name] for name in given))))


if __name__ == "__main__":
    main()
