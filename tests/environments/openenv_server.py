"""A stand-in for an OpenEnv server, for tests: a keypad that is to be pressed in an order. And problems to play on it.

It speaks the protocol of `openenv` 0.10 as the package's own server does, without the package, whose import alone
takes seconds; tests/examples/test_openenv.py plays servers of the package. `--tools` offers the keypad as MCP tools,
`--tasks` adds the task API, `--odd-tasks` tasks that are none. Keys from 90 on fail in every way a server can. Each
right key gives a reward of a half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

if TYPE_CHECKING:
    from tasks.environments.openenv.environment import OpenEnvEnvironment
    from tasks.environments.openenv.settings import OpenEnvSettings
    from tasks.environments.settings import EnvironmentSettings

FILE = Path(__file__).resolve()
DIE, HANG, FLOOD, GARBAGE, CHATTER, CRASH, NO_OBSERVATION, BAD_REWARD, NOT_FITTING, NESTED = range(90, 100)
KEY = {"type": "integer", "minimum": 0, "maximum": 99}
METADATA = {"type": "object", "additionalProperties": True}
PRESS = {
    "title": "PressAction",
    "description": "Press one key.",
    "type": "object",
    "properties": {"metadata": METADATA, "key": KEY},
    "required": ["key"],
    "additionalProperties": False,
}
CALL_TOOL = {"title": "CallToolAction", "type": "object", "properties": {"tool_name": {"type": "string"}}}
TOOLS = [
    {
        "name": "press",
        "description": "Press one key.",
        "input_schema": {"type": "object", "properties": {"key": KEY}, "required": ["key"]},
    },
    {"name": "look", "description": "The keys pressed so far.", "input_schema": {"type": "object", "properties": {}}},
]
WRONG = {
    GARBAGE: "<html>no</html>",
    CRASH: '{"type": "error", "data": {"message": "division by zero", "code": "EXECUTION_ERROR"}}',
    NO_OBSERVATION: '{"type": "observation", "data": {"reward": 1.0}}',
    BAD_REWARD: '{"type": "observation", "data": {"observation": {}, "reward": "much"}}',
    NESTED: '{"type": "observation", "data": {"observation": {"a": ' + "[" * 90 + "]" * 90 + "}}}",
}
SPLITS = {"train": 6, "test": 3}


def order_of(seed: int) -> list[int]:
    return [seed % DIE, seed // DIE % DIE]


class Keypad:
    def __init__(self, *, has_tools: bool, forgets_seed: bool):
        self.has_tools, self.forgets_seed = has_tools, forgets_seed
        self.order, self.pressed = [0, 0], list[int]()

    def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        seed = given.get("seed", given.get("index", 0) + DIE * (2 if given.get("split") == "test" else 1))
        self.order, self.pressed = order_of(time.time_ns() // 100 if self.forgets_seed else seed), []
        return self.seen({"prompt": f"Press {self.order[0]}, then {self.order[1]}."}, reward=None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if not self.has_tools:
            return self.press(action["key"], lambda pressed: {"pressed": pressed})
        if action["type"] == "list_tools":
            return self.seen({"tools": TOOLS}, reward=None)
        if action["tool_name"] == "look":
            return self.seen(self.result("look", self.pressed), reward=None)
        return self.press(action["arguments"]["key"], lambda pressed: self.result("press", pressed))

    def press(self, key: int, shown: Any) -> dict[str, Any]:
        if key == NOT_FITTING and self.has_tools:
            error = {"error_type": "execution_error", "message": "there is no such key"}
            return self.seen({"tool_name": "press", "result": None, "error": error}, reward=None)
        is_right = len(self.pressed) < 2 and key == self.order[len(self.pressed)]
        self.pressed.append(key)
        return self.seen(shown(self.pressed), reward=0.5 if is_right else 0)

    def result(self, name: str, value: Any) -> dict[str, Any]:
        text = {"type": "text", "text": json.dumps(value)}
        return {
            "tool_name": name,
            "result": {"content": [text], "structured_content": {"result": value}, "data": value, "is_error": False},
            "error": None,
        }

    def seen(self, observation: dict[str, Any], *, reward: float | None) -> dict[str, Any]:
        done = len(self.pressed) == 2
        return {"observation": {**observation, "metadata": {"order": self.order}}, "reward": reward, "done": done}


def error(message: str, code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


async def trouble(websocket: WebSocket, key: Any) -> str | None:
    """What is sent instead of an observation; None: nothing is wrong with the key."""
    if key == DIE:
        print("the keypad is on fire", file=sys.stderr, flush=True)
        os._exit(3)
    if key == HANG:
        await asyncio.sleep(3600)
    if key == CHATTER:
        await websocket.send_text(json.dumps({"type": "state", "data": {}}))
        await asyncio.sleep(3600)
    if key == FLOOD:
        return json.dumps({"type": "observation", "data": {"observation": {"text": "x" * (9 << 20)}}})
    return WRONG.get(key)


class Server:
    def __init__(self, options: argparse.Namespace):
        self.options, self.num_sessions, self.num_steps = options, 0, 0

    async def play(self, websocket: WebSocket) -> None:
        await websocket.accept()
        if self.num_sessions == self.options.sessions:
            await websocket.send_text(error("no place", "CAPACITY_REACHED"))
            await websocket.close()
            return
        self.num_sessions += 1
        try:
            await self.answer(websocket)
        except WebSocketDisconnect:
            return
        finally:
            self.num_sessions -= 1
        await websocket.close()

    async def answer(self, websocket: WebSocket) -> None:
        keypad = Keypad(has_tools=self.options.tools, forgets_seed=self.options.forgets_seed)
        while (message := json.loads(await websocket.receive_text()))["type"] != "close":
            data = message.get("data", {})
            if message["type"] == "mcp":
                told = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "does not support MCP"}}
                await websocket.send_text(json.dumps({"type": "mcp", "data": told}))
                continue
            key = data.get("arguments", data).get("key") if message["type"] == "step" else None
            if key == NOT_FITTING and not self.options.tools:
                await websocket.send_text(error("Invalid message", "VALIDATION_ERROR", errors=[{"msg": "no such key"}]))
                continue
            self.num_steps += message["type"] == "step"
            wrong = await trouble(websocket, DIE if self.num_steps == self.options.dies_at_step else key)
            seen = {} if wrong else keypad.reset(data) if message["type"] == "reset" else keypad.step(data)
            await websocket.send_text(wrong or json.dumps({"type": "observation", "data": seen}))

    async def tell(self, request: Request) -> JSONResponse:
        asked = request.path_params.get("what", request.url.path.strip("/"))
        given = await request.json() if request.method == "POST" else {}
        told = self.told(asked, given)
        return JSONResponse(told, status_code=501 if told is None else 200)

    def told(self, asked: str, given: dict[str, Any]) -> Any:
        if not self.options.tasks and asked in ("splits", "num_tasks", "task"):
            return None
        return {
            "health": {"status": "healthy"},
            "metadata": {"name": "keypad", "description": "A keypad.", "version": "1.2"},
            "schema": {"action": CALL_TOOL if self.options.tools else PRESS, "observation": {}, "state": {}},
            "list_environments": ["keypad"],
            "splits": [{"name": name, "type": name} for name in SPLITS],
            "num_tasks": {"num_tasks": SPLITS.get(given.get("split", ""), 0)},
            "task": []
            if self.options.odd_tasks
            else {"task": {"id": f"{given.get('split')}-{given.get('index')}", "index": given.get("index")}},
        }[asked]


def serve(options: argparse.Namespace) -> None:
    import uvicorn

    server = Server(options)
    routes = [
        *(Route(f"/{name}", server.tell) for name in ("health", "metadata", "schema", "list_environments")),
        Route("/keypad/{what}", server.tell, methods=["GET", "POST"]),
        WebSocketRoute("/ws", server.play),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=options.port, log_level="critical")


def solve(task: Any, observation: dict[str, Any]) -> list[dict[str, Any]]:
    """What the metadata of the first observation tells, which no model reads."""
    return [{"name": "step", "arguments": {"key": key}} for key in observation["metadata"]["order"]]


def solve_by_tools(task: Any, observation: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**call, "name": "press"} for call in solve(task, observation)]


def environment_settings(*flags: str, **changed: Any) -> EnvironmentSettings:
    """The keypad in two processes of four episodes; `changed` replaces parts of its section, or of `tools`."""
    from tasks.tools.settings import ToolSettings
    from tests import worlds

    tools = {key: changed.pop(key) for key in list(changed) if key in ToolSettings.model_fields}
    solution = "solve_by_tools" if "--tools" in flags else "solve"
    section: dict[str, Any] = {
        "command": [sys.executable, str(FILE), "--port", "{port}", *flags],
        "url": None,
        "environment": {},
        "headers": {},
        "splits": ["train", "test"] if "--tasks" in flags else [],
        "instructions": None,
        "request": "prompt",
        "solution": f"{worlds.as_custom('tests.environments.openenv_server')}:{solution}",
        "reward": "sum",
        "success_reward": 1.0,
        "max_servers": 1,
        "max_sessions": 8,
        "max_restarts": 100,
        "start_timeout_seconds": 120.0,
    }
    limits = worlds.QUICK.model_copy(update=tools)
    return worlds.environment_settings("openenv", settings=section | changed, tools=limits.model_dump())


def make_environment(*flags: str, **changed: Any) -> OpenEnvEnvironment:
    """The keypad as an environment, with nothing around it."""
    from tasks.environments.openenv.environment import OpenEnvEnvironment

    settings = environment_settings(*flags, **changed)
    return OpenEnvEnvironment.from_settings(cast("OpenEnvSettings", settings.settings), settings.tools)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--dies-at-step", type=int)
    for flag in ("--tools", "--tasks", "--odd-tasks", "--forgets-seed"):
        parser.add_argument(flag, action="store_true")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
