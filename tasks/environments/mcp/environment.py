"""mcp: any server of the Model Context Protocol as an environment, so that an agent trains on its real tools.

The server is a command or a URL. Its tools are listed once, at the start; a session with other tools is a fault.
`MCPSettings.reset` says how an episode starts; a user's function decides on success (`checker.py`), or without one
`environment.judge`. A failing server is an environment fault (`sessions.py`); an error that it reports to the model is
a reply (`messages.py`). Secrets come from environment variables and are removed from everything the server says. Left
out: prompts, resources, sampling and elicitation.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import shlex
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.environments.mcp.checker import Checker, describe_checker, load_checker, run_checker
from tasks.environments.mcp.connector import Connector
from tasks.environments.mcp.http import HttpConnector
from tasks.environments.mcp.messages import Listing, Read, checker_text, result_text
from tasks.environments.mcp.pools import LeasedSessions, Sessions, SharedSessions
from tasks.environments.mcp.scratch import ScratchRoot, empty, with_path, without_path
from tasks.environments.mcp.sessions import CLOSE_SECONDS, NOT_FOUND, Session
from tasks.environments.mcp.settings import MCPSettings
from tasks.environments.mcp.stdio import StdioConnector
from tasks.tools.authoring import describe_tool
from tasks.tools.base import Answer, Environment, EnvironmentFault, Tool, ToolReply, Verdict
from tasks.tools.layer import BoundTool, ToolError, ToolLayer
from tasks.tools.schemas import ArgumentSchema
from tasks.tools.settings import ToolSettings

CHECKER_CALLS = 10  # a checker's time limit, in calls


class MCPEnvironment(Environment):
    name = "mcp"
    has_processes = True  # servers are processes already

    def __init__(self, settings: MCPSettings, limits: ToolSettings):
        _require_sdk()
        self.settings, self.limits = settings, limits
        self.checker = load_checker(settings.checker) if settings.checker else None
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
        """ValueError if the server or the checker is not usable."""
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
            "environment": {"name": self.name, "version": "1", "seed_scheme": "none"},
            "server": {"name": self.listing.server, "version": self.listing.version},
            "reset": reset,
            "success": self._describe_success(),
            "tools": {tool.name: describe_tool(tool) for tool in self.tools},
        }

    def _describe_success(self) -> dict[str, Any]:
        if self.checker is None:
            return {"checker": None}
        return describe_checker(self.settings.checker or "", self.checker)

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def starts_afresh(self) -> bool:
        return self.settings.reset != "none"

    def cheaper_starts(self) -> str:
        seconds = self.sessions.start_seconds()
        if self.settings.reset != "process" or seconds is None:
            return ""
        return (
            f"Most of that is starting a server for each, {seconds:.1f} s (environment.settings.reset: process): "
            f"cheaper is reset: tool, where the server has a tool for it (reset_tool), or reset: scratch, where it "
            f"keeps all its state in files"
        )

    def is_live(self) -> bool:
        return True

    def close(self) -> None:
        """End all servers within CLOSE_SECONDS. Also called at exit."""
        atexit.unregister(self.close)
        with suppress(Exception):
            background.run(self.sessions.close()).result(timeout=CLOSE_SECONDS + 2)
        self.scratch.close()

    def _first_listing(self) -> Listing:
        try:
            return background.run(self.sessions.first()).result()
        except EnvironmentFault as fault:
            address = f"`{shlex.join(self.settings.command)}`" if self.settings.command else _shown(self.settings.url)
            path = "; its path is often /mcp" if self.settings.url and f"HTTP {NOT_FOUND}" in fault.message else ""
            raise ValueError(
                f"environment.settings: {fault.message}{path}. Without it there are no tools to train on; check by "
                f"hand that {self.sessions.secrets.hide(address)} works."
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
        """The entries of `problem.world` that the reset tool has arguments for."""
        if self.reset_tool is None or self._reset_schema is None:
            return {}
        names = self.reset_tool.parameters.get("properties", {})
        arguments = {name: problem.world[name] for name in names if name in problem.world}
        if not self._reset_schema.is_valid(arguments):
            raise ValueError(
                f"problem {problem.id!r}: its `world` does not fit the arguments of the reset tool "
                f"{self.reset_tool.name!r} ({self._reset_schema.reasons(arguments)}), so the episode cannot start. "
                f"Correct the `world` of the problem."
            )
        return arguments


class MCPEpisode:
    def __init__(self, environment: MCPEnvironment, problem: Problem, reset_arguments: dict[str, Any]):
        self.environment, self.problem, self.reset_arguments = environment, problem, reset_arguments
        self.calls: list[dict[str, Any]] = []
        self._session: Session | None = None
        self._may_hold_a_session = False
        self._is_closed = False  # read and written on the event loop only

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        answer = self.environment.layer.call(self, name, arguments)
        if isinstance(answer, ToolReply):
            return self._note(name, arguments, answer)
        self._may_hold_a_session = True
        return background.run(self._note_later(name, arguments, answer))

    def malformed_call(self) -> ToolReply:
        return self.environment.layer.malformed_call()

    def end_turn(self, message: str | None) -> None:
        """The server keeps its state; only the last message is judged."""

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        if self.environment.checker is None:
            return Verdict(final_message is not None)
        self._may_hold_a_session = True
        return background.run(self._verdict(self.environment.checker, final_message))

    def close(self) -> None:
        if self._may_hold_a_session:
            background.run(self._close())

    async def ask(self, name: str, arguments: Mapping[str, Any], read: Read = result_text) -> str:
        """The server's reply; the time limit starts when the episode has a session."""
        session = await self._ready_session()
        folder, seconds = session.connector.folder, self.environment.limits.timeout_seconds
        try:
            given = with_path(arguments, folder)
            return without_path(await session.call(name, given, timeout_seconds=seconds, read=read), folder)
        except ToolError as error:
            raise ToolError(error.type, without_path(error.message, folder)) from None

    async def _ready_session(self) -> Session:
        sessions = self.environment.sessions
        if self._session is not None and (self._session.is_alive or not sessions.may_replace):
            return self._session
        if self._session is not None:
            lost, self._session = self._session, None
            await sessions.give_back(lost)
        session = await sessions.take(self._reset)
        if self._is_closed:
            await sessions.give_back(session)
            raise EnvironmentFault("the episode was given up", tool="server")
        self._session = session
        return session

    async def _reset(self, session: Session) -> None:
        if self.environment.settings.reset == "scratch":
            await self._empty_scratch(session)
        tool = self.environment.reset_tool
        if tool is None:
            return
        try:
            await session.call(tool.name, self.reset_arguments, timeout_seconds=self.environment.limits.timeout_seconds)
        except ToolError as error:
            message = f"problem {self.problem.id!r}: the server could not be reset: {error.message}"
            raise EnvironmentFault(message, tool=tool.name) from None

    async def _empty_scratch(self, session: Session) -> None:
        try:
            await asyncio.to_thread(empty, Path(session.connector.folder))
        except OSError as error:
            raise EnvironmentFault(f"its scratch folder could not be emptied: {error}", tool="server") from None

    async def _close(self) -> None:
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await self.environment.sessions.give_back(session)

    async def _note_later(self, name: str, arguments: Mapping[str, Any], answer: Future[ToolReply]) -> ToolReply:
        return self._note(name, arguments, await asyncio.wrap_future(answer))

    def _note(self, name: str, arguments: Mapping[str, Any], reply: ToolReply) -> ToolReply:
        self.calls.append({"name": name, "arguments": dict(arguments), "reply": reply.text})
        return reply

    async def _verdict(self, checker: Checker, final_message: str | None) -> Verdict:
        environment = self.environment
        await self._ready_session()  # so that waiting for a session does not count as the checker's time
        work = partial(run_checker, checker, self.problem, self.calls, final_message, self._call_tool)
        seconds = CHECKER_CALLS * environment.limits.timeout_seconds
        try:
            return await environment.workers.run(work, timeout_seconds=seconds)
        except (TimeoutError, background.AllWorkersLost):
            raise EnvironmentFault(f"no verdict in {seconds:g} s", tool="checker", type="timeout") from None

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call by the checker, from its thread: any tool, the whole reply. ToolError if it is refused."""
        listing = self.environment.listing
        if name not in listing.tools:
            raise ValueError(f"the server has no tool {name!r}. {listing.nearest(name)}")
        return background.run(self.ask(name, arguments, checker_text)).result()


def _require_sdk() -> None:
    if importlib.util.find_spec("mcp") is None:
        raise ValueError(
            "environment.name is mcp and the package mcp is not installed, so no server can be used. Run "
            "`make setup-demo`, which installs it, and use the Python of .venv."
        )


def _sessions(settings: MCPSettings, limits: ToolSettings, scratch: ScratchRoot) -> Sessions:
    literals = settings.literals()
    variables, headers, secrets = settings.read_secrets()

    def connector() -> Connector:
        if settings.command is not None:
            return StdioConnector(settings.command, variables, literals, scratch)
        seconds = max(settings.start_timeout_seconds, limits.timeout_seconds)
        return HttpConnector(settings.url or "", headers, timeout_seconds=seconds)

    kind = SharedSessions if settings.reset == "none" else LeasedSessions
    return kind(connector, secrets, settings)


def _shown(url: str | None) -> str:
    """A URL for messages: its query may contain a key."""
    return (url or "").split("?")[0]


ENVIRONMENT = MCPEnvironment
