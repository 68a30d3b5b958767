"""The tool cache: stores the replies of tools and serves them instead of calling again.

- `record`: every call goes to the tools, and the answers are stored.
- `replay`: a stored answer is served. On a miss, the episode's earlier calls are made on a new episode and must get the
  stored replies; then the tool answers, and that is stored too.
- `strict`: the tools are off. A miss stops the run. Tools, description, fingerprint and how its episodes start are the
  recorded ones; the environment is made only for methods that play no episode, such as `generate`.

A call's key is the hash of the environment, the problem, the calls so far (malformed ones too) and the call. The
environment is its name, settings and fingerprint, and the limit of a reply: profiles and members of a mixture share one
store. The problem is its id, category, level, requests, world (whose names have no order) and reference. For a
`stateless` tool the key is the environment without its other tools, then what describes the tool, and arguments; the
environment does not see the call, so its verdict must not depend on it. The verdict's key is the end of the episode and
its final message. Tools that depend on time or chance do not replay exactly: `tool_cache_changes` counts recorded
answers that differ from the stored ones.

Faults are never stored: environment faults are raised, and errors for the model are added outside the cache.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import getattr_static
from typing import Any, TypeVar

from tasks.core import background
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.tools.authoring import describe_tool
from tasks.tools.base import (
    Answer,
    Environment,
    EnvironmentFault,
    Episode,
    Tool,
    ToolReply,
    Verdict,
    await_in_steps,
)
from tasks.tools.cache.store import Answers, Entry, StoredEnvironment, cache_key, entry_of
from tasks.tools.checks import without_exit
from tasks.tools.settings import CacheSettings, ToolSettings

Call = tuple[str, Mapping[str, Any]] | None  # (tool, arguments); None: a message that could not be parsed
Result = TypeVar("Result")
Steps = Generator[Future[Any], None, Result]  # yields the Futures it waits for

OF_OTHERS = {"tools", "agent"}  # parts of a description that no stateless reply depends on: its tool is in the key


class CachedEnvironment:
    """An environment behind the cache. In `strict`, `make` serves only methods that the class overrides."""

    def __init__(
        self,
        name: str,
        environment_class: type[Any],
        make: Callable[[], Environment],
        *,
        settings: Settings | None,
        limits: ToolSettings,
        cache: CacheSettings,
    ):
        self.name, self.limits, self.mode = name, limits, cache.mode
        self.answers = Answers(cache)
        self._environment_class, self._make = environment_class, make
        self._made: Environment | None = None
        self.key = environment_key(name, settings, limits)
        self._recorded = self._recording(self.key)
        description = self._recorded.description
        self._fingerprint = json_hash(description)
        self.data_key = cache_key(self.key, {part: description[part] for part in description if part not in OF_OTHERS})
        self._tools = tuple(Tool(**tool) for tool in self._recorded.tools)
        self.stateless = {tool.name: tool for tool in self._tools if tool.stateless}
        self.num_hits = self.num_misses = 0
        self.changed: list[str] = []  # two threads append; a counter could lose one

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._tools

    def start(self, problem: Problem, *, stream: str = "") -> CachedEpisode:
        return CachedEpisode(self, problem, stream)

    def describe(self) -> dict[str, Any]:
        return self._recorded.description

    def fingerprint(self) -> str:
        return self._fingerprint

    def counts(self) -> dict[str, int]:
        return {
            **(self._made.counts() if self._made else {}),
            "tool_cache_hits": self.num_hits,
            "tool_cache_misses": self.num_misses,
            "tool_cache_changes": len(self.changed),
        }

    def starts_afresh(self) -> bool:
        return self._recorded.starts_afresh

    def is_live(self) -> bool:
        return self._recorded.is_live

    def cheaper_starts(self) -> str:
        return self._made.cheaper_starts() if self._made else ""

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        self.answers.close()

    def made(self) -> Environment:
        if self._made is None:
            self._made = self._make()
        return self._made

    def find(self, key: str) -> Entry | None:
        """The stored answer, counted as hit or miss; None while recording."""
        found = self.answers.get(key) if self.mode != "record" else None
        self.num_hits += found is not None
        self.num_misses += found is None
        return found

    def keep(self, key: str, answer: ToolReply | Verdict, source: str) -> None:
        if self.answers.put(key, entry_of(answer)):
            self.changed.append(source)

    def _recording(self, key: str) -> StoredEnvironment:
        """The environment's description: from the cache in `strict`, else current, and recorded."""
        if self.mode != "strict":
            live = StoredEnvironment.of(self.made())
            self.answers.put(key, entry_of(live))
            return live
        entry = self.answers.get(key)
        if entry is None or entry.environment is None:
            raise ValueError(
                f"environment.cache.mode is strict, and {self.answers.source} has no recording of the environment "
                f"{self.name!r} with its settings and tools.max_reply_characters, so there is nothing to replay. Run "
                f"with mode: record first; what was recorded before 2026-11-29 is not used."
            )
        return entry.environment

    def __getattr__(self, name: str) -> Any:
        """Other methods: the default, or a static one, so that nothing is started; else the environment's."""
        offered, own = getattr(Environment, name), getattr_static(self._environment_class, name)
        if isinstance(own, staticmethod):
            return own.__func__
        return partial(offered, self) if own is offered else getattr(self.made(), name)


def environment_key(name: str, settings: Settings | None, limits: ToolSettings) -> str:
    given = [part and part.model_dump(mode="json", exclude=part.operational) for part in (settings, limits)]
    return cache_key("environment", name, *given)


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """In place of a call: the agent answered a user request with this message."""

    message: str | None


class CachedEpisode:
    """`place`: hash of everything so far; `unmade`: calls the cache answered; a miss makes them first."""

    def __init__(self, environment: CachedEnvironment, problem: Problem, stream: str):
        self.environment, self.problem, self.stream = environment, problem, stream
        reference = [turn.model_dump() for turn in problem.reference]
        told = problem.id, problem.category, problem.level, problem.requests, problem.world, reference
        self.place = cache_key("start", environment.key, environment.fingerprint(), *told)
        self.unmade: deque[tuple[Call, ToolReply] | EndOfTurn] = deque()
        self.num_calls = 0
        self.inner: Episode | None = None
        if environment.mode == "record":
            self._start_tools("the start")

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return self._answer((name, arguments))

    def malformed_call(self) -> Answer:
        return self._answer(None)

    def end_turn(self, message: str | None) -> None:
        self.place = cache_key("end of turn", self.place, message)
        self.unmade.append(EndOfTurn(message))

    def verdict(self, final_message: str | None) -> Verdict | Future[Verdict]:
        key = cache_key("verdict", self.place, final_message)
        found = self.environment.find(key)
        if found is None or found.verdict is None:
            return _finish(self._judge(key, final_message))
        return Verdict(**found.verdict.model_dump())

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def _answer(self, call: Call) -> Answer:
        self.num_calls += 1
        place = cache_key("call", self.place, call)
        tool = self.environment.stateless.get(call[0]) if call else None
        key = self._stateless_key(tool, call[1]) if tool and call else place
        found = self.environment.find(key)
        if found is None or found.reply is None:
            return _finish(self._ask(call, key, place, is_stateless=tool is not None))
        reply = ToolReply(found.reply.text, found.reply.valid, found.reply.error)
        self.place = place
        if tool is None:
            self.unmade.append((call, reply))
        return reply

    def _stateless_key(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        return cache_key("stateless", self.environment.data_key, tool.name, describe_tool(tool), arguments)

    def _ask(self, call: Call, key: str, place: str, *, is_stateless: bool) -> Steps[ToolReply]:
        """The tool's answer, stored. A stateless tool needs no history."""
        inner = self._start_tools(_name(call))
        num_retries = 0 if is_stateless else (yield from self._catch_up(inner))
        reply = yield from _make_call(inner, call)
        self.environment.keep(key, reply, _name(call))
        self.place = place
        return replace(reply, num_retries=reply.num_retries + num_retries)

    def _judge(self, key: str, final_message: str | None) -> Steps[Verdict]:
        inner = self._start_tools("the verdict")
        yield from self._catch_up(inner)
        verdict = yield from await_in_steps(inner.verdict(final_message))
        self.environment.keep(key, verdict, "the verdict")
        return verdict

    def _catch_up(self, inner: Episode) -> Steps[int]:
        """Make the calls that the cache answered; returns the number of retries. EnvironmentFault if a reply differs
        now: to continue would mix two environments in one episode.
        """
        num_retries = 0
        while self.unmade:
            step = self.unmade[0]
            if isinstance(step, EndOfTurn):
                with without_exit(inner, "end_turn"):
                    inner.end_turn(step.message)
                self.unmade.popleft()
                continue
            call, stored = step
            reply = yield from _make_call(inner, call)
            num_retries += reply.num_retries
            if replace(reply, num_retries=0) != stored:
                raise EnvironmentFault(
                    "the cache no longer matches the tools: a recorded call now gets another reply; record again",
                    tool=_name(call),
                )
            self.unmade.popleft()
        return num_retries

    def _start_tools(self, missing: str) -> Episode:
        """The real episode. ValueError if the tools are off."""
        if self.environment.mode == "strict":
            raise ValueError(
                f"problem {self.problem.id!r}, call {self.num_calls} ({missing}): was never recorded in "
                f"{self.environment.answers.source}, and environment.cache.mode is strict, so the tools are switched "
                f"off. Set mode: replay to let the tools answer, or record the run again."
            )
        if self.inner is None:
            environment = self.environment.made()
            with without_exit(environment, "start"):
                self.inner = environment.start(self.problem, stream=self.stream)
        return self.inner


def _make_call(inner: Episode, call: Call) -> Steps[ToolReply]:
    return (yield from await_in_steps(inner.malformed_call() if call is None else inner.call(*call)))


def _finish(steps: Steps[Result]) -> Result | Future[Result]:
    """The result of the steps: immediately if nothing waits, else a Future."""
    try:
        waiting = next(steps)
    except StopIteration as done:
        return done.value
    return background.run(_on_the_loop(steps, waiting))


async def _on_the_loop(steps: Steps[Result], waiting: Future[Any]) -> Result:
    while True:
        with suppress(Exception):  # the steps read the Future and its error themselves
            await asyncio.wrap_future(waiting)
        try:
            waiting = next(steps)
        except StopIteration as done:
            return done.value


def _name(call: Call) -> str:
    return "a malformed call" if call is None else call[0]
