"""One episode behind the tool cache: what it asks for is served, or asked of the tools and stored.

When which, and under which key, is in `cache/environment.py`. A miss needs a back end in the state that the episode is
in, so the calls which the cache answered are made on it first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tasks.core import background
from tasks.core.records import Problem
from tasks.tools.base import (
    Answer,
    Environment,
    EnvironmentFault,
    Episode,
    Tool,
    ToolReply,
    Verdict,
    await_in_steps,
    block_until,
)
from tasks.tools.cache.store import Entry, cache_key

Call = tuple[str, Mapping[str, Any]] | None  # a tool and its arguments; None is a message that could not be parsed
Result = TypeVar("Result")
Steps = Generator[Future[Any], None, Result]  # yields what has to be done before it can go on


class AnswerCache(Protocol):
    """What an episode needs of the environment behind the cache."""

    answers: Any

    @property
    def mode(self) -> str: ...

    @property
    def stateless(self) -> Mapping[str, Tool]: ...

    def fingerprint(self) -> str: ...

    def find(self, key: str) -> Entry | None: ...

    def keep(self, key: str, answer: ToolReply | Verdict, source: str) -> None: ...

    def world(self) -> Environment: ...


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """In the place of a call: the agent closed a user request with this message."""

    message: str | None


class CachedEpisode:
    """One episode. `place` is the hash of all that happened so far; `unmade` are the calls that the cache answered and
    the tools behind it have not seen: a miss makes them first.
    """

    def __init__(self, environment: AnswerCache, problem: Problem, stream: str):
        self.environment, self.problem, self.stream = environment, problem, stream
        reference = [turn.model_dump() for turn in problem.reference]
        self.place = cache_key(
            "start", environment.fingerprint(), problem.id, problem.requests, problem.world, reference
        )
        self.unmade: deque[tuple[Call, ToolReply] | EndOfTurn] = deque()
        self.num_calls = 0
        self.inner: Episode | None = None
        if environment.mode == "record":
            self._started("the start")

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return self._answer((name, arguments))

    def malformed_call(self) -> ToolReply:
        return block_until(self._answer(None))

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
        key = cache_key("stateless", tool.name, tool.version, call[1]) if tool and call else place
        found = self.environment.find(key)
        if found is None or found.reply is None:
            return _finish(self._ask(call, key, place, is_stateless=tool is not None))
        reply = ToolReply(found.reply.text, found.reply.valid, found.reply.error)
        self.place = place
        if tool is None:
            self.unmade.append((call, reply))
        return reply

    def _ask(self, call: Call, key: str, place: str, *, is_stateless: bool) -> Steps[ToolReply]:
        """The tools' own answer, stored. A stateless tool needs no history."""
        inner = self._started(_name(call))
        num_retries = 0 if is_stateless else (yield from self._catch_up(inner))
        reply = yield from _made(inner, call)
        self.environment.keep(key, reply, _name(call))
        self.place = place
        return replace(reply, num_retries=reply.num_retries + num_retries)

    def _judge(self, key: str, final_message: str | None) -> Steps[Verdict]:
        inner = self._started("the verdict")
        yield from self._catch_up(inner)
        verdict = yield from await_in_steps(inner.verdict(final_message))
        self.environment.keep(key, verdict, "the verdict")
        return verdict

    def _catch_up(self, inner: Episode) -> Steps[int]:
        """Make the calls the cache answered; returns the retries that took. EnvironmentFault where a tool now answers
        something else: to go on would mix two worlds in one episode.
        """
        num_retries = 0
        while self.unmade:
            step = self.unmade[0]
            if isinstance(step, EndOfTurn):
                inner.end_turn(step.message)
                self.unmade.popleft()
                continue
            call, stored = step
            reply = yield from _made(inner, call)
            num_retries += reply.num_retries
            if replace(reply, num_retries=0) != stored:
                raise EnvironmentFault(
                    "the cache no longer matches the tools: a recorded call now answers something else; record again",
                    tool=_name(call),
                )
            self.unmade.popleft()
        return num_retries

    def _started(self, missing: str) -> Episode:
        """The episode on the tools themselves. ValueError where they are switched off."""
        if self.environment.mode == "strict":
            raise ValueError(
                f"problem {self.problem.id!r}, call {self.num_calls} ({missing}): was never recorded in "
                f"{self.environment.answers.source}, and environment.cache.mode: strict keeps the tools switched off. "
                f"Set mode: replay to let the tools answer, or record the run again."
            )
        if self.inner is None:
            self.inner = self.environment.world().start(self.problem, stream=self.stream)
        return self.inner


def _made(inner: Episode, call: Call) -> Steps[ToolReply]:
    return (yield from await_in_steps(inner.malformed_call() if call is None else inner.call(*call)))


def _finish(steps: Steps[Result]) -> Result | Future[Result]:
    """What the steps return: at once where nothing has to be waited for, else by way of the event loop."""
    try:
        waiting = next(steps)
    except StopIteration as done:
        return done.value
    return background.run(_on_the_loop(steps, waiting))


async def _on_the_loop(steps: Steps[Result], waiting: Future[Any]) -> Result:
    while True:
        with suppress(Exception):  # the steps ask the Future themselves, and meet its error there
            await asyncio.wrap_future(waiting)
        try:
            waiting = next(steps)
        except StopIteration as done:
            return done.value


def _name(call: Call) -> str:
    return "a malformed call" if call is None else call[0]
