"""LangGraph agents in one process that stays: each line of its input is an episode, each line it prints is an end.

A program per episode imports LangGraph each time, which takes longer than the episode. This one is asked by
`fleet.py`, the function that `environment.settings.object` names.
"""

import asyncio
import json
import sys

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import APIStatusError


async def play(episode: dict) -> str:
    headers = {"x-api-key": episode["key"]}
    server = {"url": episode["mcp_url"], "transport": "streamable_http", "headers": headers}
    model = ChatOpenAI(model=episode["model"], base_url=episode["openai_url"], api_key=episode["key"])
    agent = create_agent(model, await MultiServerMCPClient({"desk": server}).get_tools())
    try:
        said = await agent.ainvoke({"messages": [("user", episode["request"])]}, {"recursion_limit": 30})
    except (GraphRecursionError, APIStatusError):  # the model's mistake is an answer; a crash would be a fault of ours
        return ""
    return said["messages"][-1].text


async def end(episode: dict) -> None:
    try:
        said = {"answer": await play(episode)}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"number": episode["number"], **said}), flush=True)


async def main() -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as episodes:
        while line := await reader.readline():
            episodes.create_task(end(json.loads(line)))


asyncio.run(main())
