"""An agent of smolagents in a world of turnwise: its model is the policy, its tools are the world's.

Nothing here trains. It is what anybody would write, with the address, key and tools from the environment.
"""

import json
import os
from pathlib import Path

from smolagents import AgentError, MCPClient, OpenAIModel, ToolCallingAgent

task = json.loads(Path(os.environ["TURNWISE_PROBLEM"]).read_text())
key = os.environ["OPENAI_API_KEY"]
model = OpenAIModel(os.environ["TURNWISE_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=key)
server = {"url": os.environ["TURNWISE_MCP_URL"], "transport": "streamable-http", "headers": {"x-api-key": key}}

with MCPClient(server, structured_output=False) as tools:
    agent = ToolCallingAgent(
        tools=tools, model=model, max_steps=12, verbosity_level=0, instructions=task["rules"] or None
    )
    try:
        answer = agent.run(task["requests"][0])
    except AgentError:  # the model's mistake is an answer; a crash would be a fault of ours, and not trained on
        answer = ""
Path(os.environ["TURNWISE_RESULT"]).write_text(json.dumps({"answer": str(answer)}))
