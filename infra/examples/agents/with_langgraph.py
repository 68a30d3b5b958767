"""An agent of LangGraph in a world of turnwise: its model is the policy, its tools are the world's.

Nothing here trains. It is what anybody would write: the client of the chat model finds OPENAI_BASE_URL and
OPENAI_API_KEY by itself.
"""

import asyncio
import json
import os
from pathlib import Path

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import APIStatusError

task = json.loads(Path(os.environ["TURNWISE_PROBLEM"]).read_text())
headers = {"x-api-key": os.environ["OPENAI_API_KEY"]}
server = {"url": os.environ["TURNWISE_MCP_URL"], "transport": "streamable_http", "headers": headers}


async def main() -> str:
    tools = await MultiServerMCPClient({"desk": server}).get_tools()
    agent = create_agent(ChatOpenAI(model=os.environ["TURNWISE_MODEL"]), tools, system_prompt=task["rules"] or None)
    try:
        said = await agent.ainvoke({"messages": [("user", task["requests"][0])]}, {"recursion_limit": 30})
    except (GraphRecursionError, APIStatusError):  # the model's mistake is an answer; a crash would be a fault of ours
        return ""
    return said["messages"][-1].text


Path(os.environ["TURNWISE_RESULT"]).write_text(json.dumps({"answer": asyncio.run(main())}))
