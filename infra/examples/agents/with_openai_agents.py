"""An agent of the OpenAI Agents SDK in a world of turnwise: its model is the policy, its tools are the world's.

Nothing here trains. It is what anybody would write: the SDK finds OPENAI_BASE_URL and OPENAI_API_KEY by itself, and
speaks the responses protocol.
"""

import asyncio
import json
import os
from pathlib import Path

from agents import Agent, AgentsException, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import APIStatusError

task = json.loads(Path(os.environ["TURNWISE_PROBLEM"]).read_text())
server = {"url": os.environ["TURNWISE_MCP_URL"], "headers": {"x-api-key": os.environ["OPENAI_API_KEY"]}}
set_tracing_disabled(True)  # else it sends what happens to its maker's servers


async def main() -> str:
    async with MCPServerStreamableHttp(server) as desk:
        agent = Agent(
            "desk", instructions=task["rules"] or None, model=os.environ["TURNWISE_MODEL"], mcp_servers=[desk]
        )
        try:
            return (await Runner.run(agent, task["requests"][0], max_turns=12)).final_output
        except (AgentsException, APIStatusError):  # the model's mistake is an answer; a crash would be a fault of ours
            return ""


Path(os.environ["TURNWISE_RESULT"]).write_text(json.dumps({"answer": asyncio.run(main())}))
