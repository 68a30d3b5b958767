"""mcp: any server of the Model Context Protocol as a world, so that an agent trains on the tools it will meet.

The server is a command that is started, or a URL. Its tools are listed once, when the environment is made, and are the
world's tools from then on; a session that has others is a fault. An episode finds a fresh world in a process of its
own, on a session whose scratch folder was emptied or that a named tool has reset, or as the last one left it. Success
is what a function of the user's or a judge says (`checker.py`, `judge.py`). Problems come from the user's JSONL: an MCP
server cannot write its own.

What a server gets wrong is ours, never the model's (`sessions.py`); what it tells the model is a reply, errors
included (`messages.py`). Secrets reach the server by the names of environment variables and are taken out of all
that it says. Left out: prompts, resources, sampling and elicitation; a server that asks for one is told there is none.
"""

from __future__ import annotations

import atexit
import importlib.util
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.secrets import Secrets, read_secret
from tasks.environments.mcp.checker import describe_checker, load_checker
from tasks.environments.mcp.connector import Connector
from tasks.environments.mcp.episode import MCPEpisode
from tasks.environments.mcp.http import HttpConnector
from tasks.environments.mcp.judge import Judge
from tasks.environments.mcp.messages import Listing
from tasks.environments.mcp.pools import LeasedSessions, Sessions, SharedSessions
from tasks.environments.mcp.scratch import ScratchRoot
from tasks.environments.mcp.sessions import CLOSE_SECONDS
from tasks.environments.mcp.settings import LiteralValue, MCPSettings
from tasks.environments.mcp.stdio import StdioConnector
from tasks.tools.authoring import describe_tool
from tasks.tools.base import Environment, EnvironmentFault, Tool
from tasks.tools.layer import BoundTool, ToolLayer
from tasks.tools.schemas import ArgumentSchema
from tasks.tools.settings import ToolSettings


class MCPEnvironment(Environment):
    """The world of one server. Made by starting it, which takes as long as the server needs."""

    name = "mcp"

    def __init__(self, settings: MCPSettings, limits: ToolSettings):
        _require_sdk()
        self.settings, self.limits = settings, limits
        self.checker = load_checker(settings.checker) if settings.checker else None
        self.judge = Judge(settings.judge) if settings.judge else None
        self.workers = background.Workers(limits.max_workers)
        self.scratch = ScratchRoot()
        self.sessions = _sessions(settings, limits, self.scratch)
        atexit.register(self.close)
        try:
            self.listing = self._first_listing()
            self.layer = ToolLayer([self._bound(tool) for tool in self._visible_tools()], limits)
            self.reset_tool = self._named(settings.reset_tool, "reset_tool") if settings.reset_tool else None
            self._reset_schema = ArgumentSchema(self.reset_tool) if self.reset_tool else None
        except BaseException:
            self.close()
            raise
        pinned = [*self.layer.tools, *([self.reset_tool] if self.reset_tool else [])]
        self.sessions.pin(self.listing, [tool.name for tool in pinned])

    @classmethod
    def from_settings(cls, settings: MCPSettings | None, tools: ToolSettings) -> Self:
        """ValueError in one line where server, checker or judge cannot be had."""
        if settings is None:
            raise ValueError(
                "environment.settings is null, so mcp does not know which server to use. Fill it in; "
                "tasks/environments/README.md has an example."
            )
        return cls(settings, tools)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.layer.tools

    def start(self, problem: Problem, *, stream: str = "") -> MCPEpisode:
        return MCPEpisode(self, problem, self._reset_arguments(problem))

    def describe(self) -> dict[str, Any]:
        reset = {"how": self.settings.reset, "tool": describe_tool(self.reset_tool) if self.reset_tool else None}
        return {
            "world": {"name": self.name, "version": "1", "seed_scheme": "none"},
            "server": {"name": self.listing.server, "version": self.listing.version},
            "reset": reset,
            "success": self._describe_success(),
            "tools": {tool.name: describe_tool(tool) for tool in self.tools},
        }

    def _describe_success(self) -> dict[str, Any]:
        if self.judge is not None:
            return {"judge": self.judge.describe()}
        assert self.checker is not None
        return describe_checker(self.settings.checker or "", self.checker)

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def starts_afresh(self) -> bool:
        return self.settings.reset != "none"

    def is_live(self) -> bool:
        return True

    def close(self) -> None:
        """End all servers; in CLOSE_SECONDS they are gone. Also called when the process ends."""
        atexit.unregister(self.close)
        with suppress(Exception):
            background.run(self._close()).result(timeout=CLOSE_SECONDS + 2)
        self.scratch.close()

    async def _close(self) -> None:
        await self.sessions.close()
        if self.judge is not None:
            await self.judge.close()

    def _first_listing(self) -> Listing:
        try:
            return background.run(self.sessions.first()).result()
        except EnvironmentFault as fault:
            address = f"`{shlex.join(self.settings.command)}`" if self.settings.command else _shown(self.settings.url)
            raise ValueError(
                f"environment.mcp: {fault.message}. Without it there are no tools to train on; see by hand whether "
                f"{self.sessions.secrets.hide(address)} works."
            ) from None

    def _visible_tools(self) -> list[Tool]:
        allowed = self.settings.allowed_tools
        if allowed is not None:
            return [self._named(name, "allowed_tools") for name in allowed]
        return [tool for name, tool in self.listing.tools.items() if name != self.settings.reset_tool]

    def _named(self, name: str, setting: str) -> Tool:
        if name not in self.listing.tools:
            raise ValueError(
                f"environment.settings.{setting} names {name!r}, which the server {self.listing.server!r} does not "
                f"have, so it could not be called. {self.listing.nearest(name)}"
            )
        return self.listing.tools[name]

    def _bound(self, tool: Tool) -> BoundTool:
        async def handle(episode: MCPEpisode, arguments: Mapping[str, Any]) -> str:
            return await episode.ask(tool.name, arguments)

        return BoundTool(tool, handle, "async", own_clock=True)

    def _reset_arguments(self, problem: Problem) -> dict[str, Any]:
        """What the reset tool is told of the problem: those entries of its world that the tool has arguments for."""
        if self.reset_tool is None or self._reset_schema is None:
            return {}
        names = self.reset_tool.parameters.get("properties", {})
        arguments = {name: problem.world[name] for name in names if name in problem.world}
        if not self._reset_schema.is_valid(arguments):
            raise ValueError(
                f"problem {problem.id!r}: its world does not suit the reset tool {self.reset_tool.name!r} "
                f"({self._reset_schema.reasons(arguments)}), so the episode could not begin. Correct the problem's "
                f"world."
            )
        return arguments


def _require_sdk() -> None:
    if importlib.util.find_spec("mcp") is None:
        raise ValueError(
            "environment.name is mcp and the package mcp is not installed, so no server can be spoken to. Run "
            "`make setup-demo`, which installs it, and use the Python of .venv."
        )


def _sessions(settings: MCPSettings, limits: ToolSettings, scratch: ScratchRoot) -> Sessions:
    """The sessions as `reset` asks for them, over the connection the settings name."""
    literals = {name: given.value for name, given in settings.environment.items() if isinstance(given, LiteralValue)}
    named = {name: given for name, given in settings.environment.items() if not isinstance(given, LiteralValue)}
    variables, headers = (
        {name: read_secret(variable, setting=f"environment.settings.{part}.{name}") for name, variable in given.items()}
        for part, given in (("environment", named), ("headers", settings.headers))
    )
    secrets = Secrets([*variables.values(), *headers.values()])
    seconds = settings.start_timeout_seconds

    def connector() -> Connector:
        if settings.command is not None:
            return StdioConnector(settings.command, variables, literals, scratch)
        return HttpConnector(settings.url or "", headers, timeout_seconds=max(seconds, limits.timeout_seconds))

    if settings.reset == "none":
        return SharedSessions(connector, secrets, limit=settings.max_servers, start_timeout_seconds=seconds)
    return LeasedSessions(
        connector,
        secrets,
        limit=settings.max_servers,
        start_timeout_seconds=seconds,
        reuse=settings.reset in ("tool", "scratch"),
    )


def _shown(url: str | None) -> str:
    """A URL as it may be printed: what follows a question mark is often a key."""
    return (url or "").split("?")[0]


ENVIRONMENT = MCPEnvironment
