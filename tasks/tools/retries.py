"""Calls made again in place, after a fault of ours: only of tools that declare it harmless.

A booking that timed out may have booked, so only a `read_only` or `idempotent` tool is asked again, after a pause that
doubles each time. For any other tool the fault goes on to whoever runs the episode, which then starts over in a fresh
environment. The pause is spent on the event loop: other episodes go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tasks.core import background
from tasks.core.records import Problem
from tasks.tools.base import Answer, Environment, EnvironmentFault, Episode, ToolReply
from tasks.tools.settings import ToolSettings
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper


class RetryingEnvironment(EnvironmentWrapper):
    """Episodes whose harmless calls are made up to `max_retries` times again."""

    def __init__(self, inner: Environment, settings: ToolSettings):
        super().__init__(inner)
        self.settings = settings
        self.harmless = frozenset(tool.name for tool in inner.tools if tool.may_repeat)

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return RetryingEpisode(self.inner.start(problem, stream=stream), self.settings, self.harmless)


class RetryingEpisode(EpisodeWrapper):
    """An answer that is there at once goes straight through; everything else is awaited, and repeated if need be."""

    def __init__(self, inner: Episode, settings: ToolSettings, harmless: frozenset[str]):
        super().__init__(inner)
        self.settings, self.harmless = settings, harmless

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if name not in self.harmless or not self.settings.max_retries:
            return self.inner.call(name, arguments)
        try:
            answer = self.inner.call(name, arguments)
        except EnvironmentFault as fault:
            return background.run(self._call_again(name, arguments, fault, num_retries=1))
        if isinstance(answer, Future):
            return background.run(self._await_answer(name, arguments, answer))
        return answer

    async def _await_answer(self, name: str, arguments: Mapping[str, Any], answer: Future[ToolReply]) -> ToolReply:
        try:
            return await asyncio.wrap_future(answer)
        except EnvironmentFault as fault:
            return await self._call_again(name, arguments, fault, num_retries=1)

    async def _call_again(
        self, name: str, arguments: Mapping[str, Any], fault: EnvironmentFault, *, num_retries: int
    ) -> ToolReply:
        """The call once more after a pause, and so on until it answers or `max_retries` are spent."""
        while num_retries <= self.settings.max_retries:
            await asyncio.sleep(self.settings.backoff_seconds * 2 ** (num_retries - 1))
            try:
                answer = self.inner.call(name, arguments)
                reply = await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer
                return replace(reply, num_retries=reply.num_retries + num_retries)
            except EnvironmentFault as again:
                fault, num_retries = again, num_retries + 1
        fault.num_retries += num_retries - 1
        raise fault
