"""A server of OpenEnv with MCP tools and tasks, run in an environment of its own: a safe whose code is in two books.

`read` gives a digit of the code, `open` takes the code: 1.0 and the end, or 0.0. tests/examples/test_openenv.py plays
it; `make setup-agents` installs what it needs.
"""

import argparse
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

CODES = {"train": ["12", "34", "56"], "test": ["78"]}


class Safe(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("safe")
        self.code, self.reward, self.is_open = "", None, False
        server.tool(self.read)
        server.tool(self.open)
        super().__init__(server)

    def read(self, book: int) -> str:
        """The digit in a book: 1 or 2."""
        if book not in (1, 2):
            raise ValueError(f"there is no book {book}")
        return self.code[book - 1]

    def open(self, code: str) -> str:
        """Open the safe with a code of two digits."""
        self.is_open = code == self.code
        self.reward = float(self.is_open)
        return "open" if self.is_open else "shut"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **task: Any) -> Observation:
        self.code = CODES[task["split"]][task["index"]]
        self.reward, self.is_open = None, False
        return CallToolObservation(tool_name="reset", result=f"Safe {task['index']} of {task['split']}.")

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **given)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = self.reward, self.is_open
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        return Observation(metadata={"error": "this safe has tools only"})

    @property
    def state(self) -> State:
        return State()

    def list_splits(self) -> list[str]:
        return list(CODES)

    def num_tasks(self, split: str) -> int:
        return len(CODES[split])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return {"code": CODES[split][index]}


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    app = create_fastapi_app(Safe, CallToolAction, CallToolObservation, max_concurrent_envs=4, env_name="safe")
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
