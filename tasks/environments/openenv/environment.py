"""openenv: any server of OpenEnv as an environment, so that its tasks, tools and rewards train an agent here.

The server is a URL, or a command that starts it in its own environment (`servers.py`). An episode is a session of its
own at the server (`sessions.py`), reset with what its problem says. Its MCP tools are the tools; a server whose actions
are its own has the tool `step`. The verdict is the server's reward against `success_reward`. A server that dies, hangs,
floods or breaks the protocol is an environment fault. Left out: renderings, harnesses and the web interface.
"""

from __future__ import annotations

import atexit
import importlib.util
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Self

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.text import show_difference
from tasks.environments.openenv.discovery import discover, find_splits
from tasks.environments.openenv.messages import ENDED, STEP, Observed, Offer, rpc_reply, tool_reply
from tasks.environments.openenv.problems import OBSERVED, RESET, Source, halves_of, load_solution, no_solution
from tasks.environments.openenv.servers import Server, Servers
from tasks.environments.openenv.sessions import CLOSE_SECONDS, Session
from tasks.environments.openenv.settings import OpenEnvSettings
from tasks.tools.authoring import describe_tool
from tasks.tools.base import Answer, Environment, EnvironmentFault, Halves, SourceCount, Tool, ToolReply, Verdict
from tasks.tools.layer import BoundTool, ToolError, ToolLayer, as_json
from tasks.tools.settings import ToolSettings


class OpenEnvEnvironment(Environment):
    name = "openenv"
    has_processes = True  # servers are processes already

    def __init__(self, settings: OpenEnvSettings, limits: ToolSettings):
        _require_client()
        self.settings, self.limits = settings, limits
        self.solution = load_solution(settings.solution) if settings.solution else no_solution
        self.servers = Servers(settings)
        atexit.register(self.close)
        try:
            self.offer, self.source = background.run(self._look()).result()
            self.layer = ToolLayer([self._bound(tool) for tool in self.offer.tools.values()], limits)
        except EnvironmentFault as fault:
            self.close()
            address = f"`{shlex.join(settings.command)}`" if settings.command else (settings.url or "").split("?")[0]
            raise ValueError(
                f"environment.settings: {fault.message}. Without it there are no tools to train on; check by hand that "
                f"{self.servers.secrets.hide(address)} works."
            ) from None
        except BaseException:
            self.close()
            raise
        self.servers.check = self._check

    @classmethod
    def from_settings(cls, settings: OpenEnvSettings | None, tools: ToolSettings) -> Self:
        """ValueError if the server or the solution is not usable."""
        if settings is None:
            raise ValueError(
                "environment.settings is null, so openenv does not know which server to use. Fill it in; "
                "tasks/environments/openenv/README.md has an example."
            )
        return cls(settings, tools)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.layer.tools

    def start(self, problem: Problem, *, stream: str = "") -> OpenEnvEpisode:
        if not isinstance(problem.world.get(RESET), dict):
            raise ValueError(
                f"problem {problem.id!r}: its `world` has no {RESET!r}, with which the server is to be reset, so the "
                f'episode cannot start. Write, for example, "world": {{"{RESET}": {{"seed": 7}}}}.'
            )
        return OpenEnvEpisode(self, problem)

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """Tasks of the splits, or seeds; a random sample where there are more."""
        return iter(background.run(self.source.write(self.solution, seed=seed, num_problems=num_problems)).result())

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount:
        return self.source.count(num_problems)

    @staticmethod
    def knows_solution(problem: Problem) -> bool:
        return any(turn.calls for turn in problem.reference)

    def published_halves(self) -> Halves | None:
        return halves_of(self.source.splits)

    def describe(self) -> dict[str, Any]:
        return {
            "environment": {"name": self.name, "version": "1", "seed_scheme": "world.reset"},
            "server": {"name": self.offer.name, "version": self.offer.version},
            "success": {"reward": self.settings.reward, "at_least": self.settings.success_reward},
            "tools": {tool.name: describe_tool(tool) for tool in self.tools},
        }

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def is_live(self) -> bool:
        return True

    def close(self) -> None:
        """End all servers. Also called at exit."""
        atexit.unregister(self.close)
        with suppress(Exception):
            background.run(self.servers.close()).result(timeout=2 * CLOSE_SECONDS + 2)

    async def _look(self) -> tuple[Offer, Source]:
        server = await self.servers.take()
        try:
            offer = await discover(server)
            wanted = self.settings.splits
            path, splits = await find_splits(server, wanted) if wanted else ("", {})
        finally:
            await self.servers.give_back(server)
        return offer, Source(self.settings, self.servers, path, splits)

    async def _check(self, server: Server) -> None:
        """Later servers must be what the first was."""
        found = await discover(server)
        if found != self.offer:
            raise EnvironmentFault("the server has changed since the environment was made", tool="server")

    def _bound(self, tool: Tool) -> BoundTool:
        async def handle(episode: OpenEnvEpisode, arguments: Mapping[str, Any]) -> str:
            return await episode.act(tool.name, arguments)

        return BoundTool(tool, handle, "async", own_clock=True)


class OpenEnvEpisode:
    """`rewards`: what the server gave, in order, that of the reset included; it gives none where it has not judged."""

    def __init__(self, environment: OpenEnvEnvironment, problem: Problem):
        self.environment, self.problem = environment, problem
        self.rewards: list[float] = []
        self.is_done = False
        self._server: Server | None = None
        self._session: Session | None = None
        self._may_hold_a_session = self._is_closed = False  # the second is read and written on the event loop only

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        answer = self.environment.layer.call(self, name, arguments)
        self._may_hold_a_session = self._may_hold_a_session or isinstance(answer, Future)
        return answer

    def malformed_call(self) -> ToolReply:
        return self.environment.layer.malformed_call()

    def end_turn(self, message: str | None) -> None:
        """The server keeps its state."""

    def verdict(self, final_message: str | None) -> Verdict:
        """The reward against the threshold; an episode without any reward has not reached it."""
        settings = self.environment.settings
        given = self.rewards[-1:] if settings.reward == "last" else self.rewards
        reward = sum(given) if given else None
        success = reward is not None and reward >= settings.success_reward
        details = {"reward": reward, "rewards": self.rewards, "done": self.is_done}
        return Verdict(success, {"reward": success}, details)

    def close(self) -> None:
        if self._may_hold_a_session:
            background.run(self._close())

    async def act(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The reply to one call; the time limit starts when the episode has a session."""
        sent = as_json(arguments)
        session = await self._ready_session()
        if self.is_done:
            raise ToolError("conflict", "the episode has ended, and nothing more can be done in it")
        ask = partial(self._step, session, tool)
        if tool == STEP and not self.environment.offer.calls_are_steps:
            return self._told((await ask(sent)).text())
        if self.environment.offer.calls_are_steps:
            observed = await ask({"type": "call_tool", "tool_name": tool, "arguments": sent})
            is_result = "tool_name" in observed.observation
            return self._told(tool_reply(observed.observation, tool) if is_result else observed.text())
        seconds = self.environment.limits.timeout_seconds
        call = {"name": tool, "arguments": sent}
        return rpc_reply(await session.ask_mcp("tools/call", call, tool=tool, seconds=seconds), tool)

    async def _step(self, session: Session, tool: str, action: Mapping[str, Any]) -> Observed:
        observed = await session.step(action, tool=tool, seconds=self.environment.limits.timeout_seconds)
        self._note(observed)
        return observed

    def _told(self, text: str) -> str:
        return "\n".join(part for part in (text, ENDED if self.is_done else "") if part)

    def _note(self, observed: Observed) -> None:
        self.is_done = observed.done
        if observed.reward is not None:
            self.rewards.append(float(observed.reward))

    async def _ready_session(self) -> Session:
        """The session of this episode, opened and reset by its first call."""
        if self._session is not None:
            return self._session
        if self._is_closed:
            raise EnvironmentFault("the episode was closed", tool="server")
        server = await self.environment.servers.take()
        self._server, self._session = server, server.session()
        session, seconds = self._session, self.environment.settings.start_timeout_seconds
        if not self._is_closed:
            await session.open(seconds=seconds)
        if self._is_closed:  # while it waited
            await session.close()
            await self._close()
            raise EnvironmentFault("the episode was closed", tool="server")
        observed = await session.reset(self.problem.world[RESET], seconds=seconds)
        self._refuse_another_beginning(observed)
        self._note(observed)
        return session

    def _refuse_another_beginning(self, observed: Observed) -> None:
        """The model has read the first observation as its request, so this one must be the same."""
        written = self.problem.world.get(OBSERVED)
        if isinstance(written, str) and written != observed.text():
            raise EnvironmentFault(
                f"the server begins this problem otherwise than when it was written: "
                f"{show_difference(written, observed.text())}",
                tool="reset",
            )

    async def _close(self) -> None:
        self._is_closed = True
        server, session = self._server, self._session
        self._server = self._session = None
        if server is not None and session is not None:
            await session.close()
            await self.environment.servers.give_back(server, is_spent=session.has_timed_out)


def _require_client() -> None:
    if importlib.util.find_spec("websockets") is None:
        raise ValueError(
            "environment.name is openenv and the package websockets is not installed, so no server can be used. Run "
            "`make setup-demo`, which installs it, and use the Python of .venv."
        )


ENVIRONMENT = OpenEnvEnvironment
