"""One episode in the world of an MCP server: a session to call its tools on, the calls it made, and its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tasks.core import background
from tasks.core.records import Problem
from tasks.environments.mcp.checker import run_checker
from tasks.environments.mcp.judge import Judge
from tasks.environments.mcp.messages import Listing
from tasks.environments.mcp.pools import Sessions
from tasks.environments.mcp.scratch import empty, with_path, without_path
from tasks.environments.mcp.sessions import Session
from tasks.environments.mcp.settings import MCPSettings
from tasks.tools.base import Answer, EnvironmentFault, Tool, ToolReply, Verdict, error_text
from tasks.tools.layer import ToolError, ToolLayer
from tasks.tools.settings import ToolSettings

CHECKER_CALLS = 10  # a checker may take as long as this many calls


class MCPServer(Protocol):
    """What an episode needs of the environment it belongs to."""

    settings: MCPSettings
    limits: ToolSettings
    layer: ToolLayer
    sessions: Sessions
    listing: Listing
    reset_tool: Tool | None
    checker: Callable[..., Any] | None
    judge: Judge | None
    workers: background.Workers


class MCPEpisode:
    """One trajectory's use of the server. A session is taken with the first call that needs one, never before."""

    def __init__(self, environment: MCPServer, problem: Problem, reset_arguments: dict[str, Any]):
        self.environment, self.problem, self.reset_arguments = environment, problem, reset_arguments
        self.calls: list[dict[str, Any]] = []
        self._session: Session | None = None
        self._may_hold_a_session = False
        self._is_closed = False  # read and written on the event loop only

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        answer = self.environment.layer.call(self, name, arguments)
        if isinstance(answer, ToolReply):
            return self._noted(name, arguments, answer)
        self._may_hold_a_session = True
        return background.run(self._noted_later(name, arguments, answer))

    def malformed_call(self) -> ToolReply:
        return self.environment.layer.malformed_call()

    def end_turn(self, message: str | None) -> None:
        """The world stays as it is; only the last message is judged."""

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        self._may_hold_a_session = True
        return background.run(self._verdict(final_message))

    def close(self) -> None:
        if self._may_hold_a_session:
            background.run(self._close())

    async def ask(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the server says to a call; its time runs from the moment it has a place for this episode."""
        session = await self._ready_session()
        folder, seconds = session.connector.folder, self.environment.limits.timeout_seconds
        try:
            return without_path(await session.call(name, with_path(arguments, folder), timeout_seconds=seconds), folder)
        except ToolError as error:
            raise ToolError(error.type, without_path(error.message, folder)) from None

    async def _ready_session(self) -> Session:
        sessions = self.environment.sessions
        if self._session is not None and (self._session.is_alive or not sessions.may_replace):
            return self._session
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
            message = f"problem {self.problem.id!r}: the world could not be reset: {error.message}"
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

    async def _noted_later(self, name: str, arguments: Mapping[str, Any], answer: Future[ToolReply]) -> ToolReply:
        return self._noted(name, arguments, await asyncio.wrap_future(answer))

    def _noted(self, name: str, arguments: Mapping[str, Any], reply: ToolReply) -> ToolReply:
        self.calls.append({"name": name, "arguments": dict(arguments), "reply": reply.text})
        return reply

    async def _verdict(self, final_message: str | None) -> Verdict:
        environment = self.environment
        if environment.judge is not None:
            return await environment.judge.verdict(self.problem, self.calls, final_message)
        assert environment.checker is not None
        await self._ready_session()  # so that waiting for a place is none of the checker's time
        work = partial(run_checker, environment.checker, self.problem, self.calls, final_message, self._call_tool)
        seconds = CHECKER_CALLS * environment.limits.timeout_seconds
        try:
            return await environment.workers.run(work, timeout_seconds=seconds)
        except (TimeoutError, background.AllWorkersLost):
            raise EnvironmentFault(f"no verdict in {seconds:g} s", tool="checker", type="timeout") from None

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A checker's own call, from its thread: any tool of the server, the reply in full."""
        listing = self.environment.listing
        if name not in listing.tools:
            raise ValueError(f"the server has no tool {name!r}. {listing.nearest(name)}")
        try:
            return background.run(self.ask(name, arguments)).result()
        except ToolError as error:
            return error_text(error.type, error.message)
