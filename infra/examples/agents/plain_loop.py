"""An agent as an async function: a plain loop of the openai client, with the world's tools over MCP (mcp 2).

`object: tasks.custom.plain_loop:play` plays it, once a copy is in tasks/custom.
"""

import json
import ssl

import httpx2
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openai import APIStatusError, AsyncOpenAI

# Once: a client that makes its own takes longer for it than for the rest of an episode.
TLS = ssl.create_default_context()


async def play(task, endpoint):
    """The answer. What the model gets wrong is told to it; a crash would be a fault, which teaches nothing."""
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {endpoint.key}"}, timeout=None, verify=TLS) as http,
        streamable_http_client(endpoint.mcp_url, http_client=http) as streams,
        ClientSession(*streams[:2]) as world,
    ):
        model = AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, http_client=http)
        await world.initialize()
        tools = [as_function(tool) for tool in (await world.list_tools()).tools]
        messages, answer = [{"role": "system", "content": task.rules}] if task.rules else [], ""
        for request in task.requests:
            messages.append({"role": "user", "content": request})
            while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
                try:
                    asked = await model.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
                except APIStatusError:  # a budget of `sampling` is used up
                    return answer
                said = asked.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or []:
                    text = await ask(world, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            answer = said.content or ""
    return answer


def as_function(tool):
    """A tool as MCP lists it, as the openai client takes it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def ask(world, name, arguments):
    """What the tool answers; also that there is no such tool, or that the arguments are no JSON object."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return "The arguments are not a JSON object."
    return (await world.call_tool(name, given)).content[0].text
