"""agent: episodes that a program or an async function of the user's drives, in another environment's world or its own.

An agent gets an endpoint (`tools/driven.py`): the policy in the wire protocols of OpenAI and Anthropic, and the world's
tools by MCP. Its crash, its deadline and a verdict that nobody gives are faults of the environment: tried again, then
dropped, never a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.load_object import load_object_of
from tasks.core.records import Problem, Turn
from tasks.core.secrets import read_secret
from tasks.core.settings import Settings
from tasks.environments.agent.programs import Agent, Function, Program, Result
from tasks.environments.agent.settings import AgentSettings, ErrandSettings
from tasks.environments.agent.verdicts import VerdictGiver
from tasks.environments.settings import EnvironmentSettings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Environment, EnvironmentFault, Episode, Verdict
from tasks.tools.driven import AgentClock, AgentEnd, AgentTask, Endpoint
from tasks.tools.judge.environment import JudgedEpisode
from tasks.tools.server_settings import LiteralValue
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper

LOOK_SECONDS = 0.05  # at least between two looks at an agent's clock
Launch = Callable[[AgentTask, Endpoint], Agent]


class ErrandEpisode(ToolEpisode):
    """Without a world: the agent has its own tools."""

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(final_message is not None)


class Errands(ToolEnvironment):
    name, episode_class = "agent", ErrandEpisode
    has_processes = True  # each agent is one


class AgentEnvironment(EnvironmentWrapper):
    """Around the environment whose problems, tools and verdict it has."""

    name = "agent"

    def __init__(self, inner: Environment, settings: AgentSettings):
        super().__init__(inner)
        self.settings = settings
        self.launch = _launcher(settings)
        asks_itself = settings.verdict is None or settings.verdict.by == "judge"
        self.verdict = None if asks_itself or settings.verdict is None else VerdictGiver(settings.verdict)

    @classmethod
    def compose(cls, section: EnvironmentSettings, load: Callable[[EnvironmentSettings], Environment]) -> Environment:
        """Load the world with the rest of the section: its tools, cache, faults and judge."""
        settings = section.settings
        assert isinstance(settings, AgentSettings)
        if section.user is not None:
            raise ValueError(
                "environment.user speaks to the policy, and an agent of environment.name: agent speaks for itself. Set "
                "environment.user to null"
            )
        within = (
            settings.world.within(section)
            if settings.world
            else section.model_copy(update={"settings": ErrandSettings()})
        )
        return cls(load(within), settings)

    def start(self, problem: Problem, *, stream: str = "") -> AgentEpisode:
        return AgentEpisode(self.inner.start(problem, stream=stream), problem, self)

    def task_of(self, problem: Problem) -> AgentTask:
        return AgentTask(
            id=problem.id,
            category=problem.category,
            requests=problem.requests,
            rules=self.inner.rules_for(problem),
            world=problem.world if self.settings.world is None else {},
        )

    def describe(self) -> dict[str, Any]:
        started = self.settings.model_dump(mode="json", exclude={"world", "deadline_seconds"})
        return {**self.inner.describe(), "agent": {**started, "sources": _source_hashes(self.settings)}}

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def is_driven_by_agent(self) -> bool:
        return True


class AgentEpisode(EpisodeWrapper):
    """`launch` starts the agent, `close` ends it. An episode that was not launched is the world's alone: references are
    played so.
    """

    def __init__(self, inner: Episode, problem: Problem, environment: AgentEnvironment):
        super().__init__(inner)
        self.problem, self.environment = problem, environment
        self.models = environment.settings.models
        self.clock = AgentClock(environment.settings.deadline_seconds)
        self.agent: Agent | None = None
        self.result: Result = {}

    def launch(self, endpoint: Endpoint) -> Future[AgentEnd]:
        """EnvironmentFault where it cannot be started."""
        self.clock = AgentClock(self.environment.settings.deadline_seconds)
        self.agent = self.environment.launch(self.environment.task_of(self.problem), endpoint)
        return background.run(self._watch(self.agent))

    def read_turns(self, turns: Sequence[Turn]) -> None:
        if isinstance(self.inner, JudgedEpisode):
            self.inner.read_turns(turns)

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        giver = self.environment.verdict
        found: Verdict | Future[Verdict] = self.inner.verdict(final_message)
        if giver is None or self.agent is None or final_message is None:
            return found
        return background.run(self._both(found, giver, final_message))

    def close(self) -> None:
        if self.agent is not None:
            background.run(asyncio.to_thread(self.agent.stop))
        self.inner.close()

    async def _watch(self, agent: Agent) -> AgentEnd:
        ended = asyncio.wrap_future(agent.ended)
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may read it
        while not ended.done():
            left = self.clock.left
            if left <= 0:
                seconds = self.environment.settings.deadline_seconds
                raise EnvironmentFault(f"it did not end in {seconds:g} s of its own", tool="agent", type="timeout")
            await asyncio.wait({ended}, timeout=max(left, LOOK_SECONDS))
        self.result = ended.result()
        return AgentEnd(self.result.get("answer"))

    async def _both(self, found: Verdict | Future[Verdict], giver: VerdictGiver, final_message: str) -> Verdict:
        """The world's verdict, in which a judge may have a say, and the agent's own."""
        of_world = await asyncio.wrap_future(found) if isinstance(found, Future) else found
        own = await giver.judge(self.problem, self.result, final_message)
        success = own.success and of_world.success
        return Verdict(success, {**of_world.checks, **own.checks}, {**of_world.details, **own.details})


def choose_class(settings: Settings | None) -> type[Any]:
    return Errands if isinstance(settings, ErrandSettings) else AgentEnvironment


def _launcher(settings: AgentSettings) -> Launch:
    """ValueError where the program or function is missing."""
    if settings.object is not None:
        function = load_object_of("environment.settings.object", settings.object)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"environment.settings.object: {settings.object} is no async function, so it cannot run beside others. "
                f"Define it as async def agent(task, endpoint)"
            )
        return partial(Function, function)
    assert settings.command is not None
    if shutil.which(settings.command[0]) is None:
        raise ValueError(
            f"environment.settings.command: there is no program {settings.command[0]!r}, so no agent could be started. "
            f"Install it, or write its path"
        )
    variables = {
        name: given.value
        if isinstance(given, LiteralValue)
        else read_secret(given, setting=f"environment.settings.environment.{name}")
        for name, given in settings.environment.items()
    }
    return partial(Program, settings.command, variables)


def _source_hashes(settings: AgentSettings) -> dict[str, str]:
    """Of the modules of its function and checker, and of the files that its command names, by name. A program outside
    the project is none of them, which is where an interpreter lies.
    """
    checker = settings.verdict.checker if settings.verdict is not None else None
    files = {name: _module_file(name) for name in (settings.object, checker) if name is not None}
    for number, part in enumerate(settings.command or []):
        if Path(part).is_file() and (number > 0 or Path(part).resolve().is_relative_to(Path.cwd())):
            files[part] = Path(part)
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def _module_file(object_path: str) -> Path:
    file = importlib.import_module(object_path.partition(":")[0]).__file__
    assert file is not None
    return Path(file)


ENVIRONMENT = choose_class
