"""Repeats calls after an environment fault, only for `read_only` and `idempotent` tools: a booking that timed out may
have booked. The pause doubles each time and runs on the event loop, so other episodes continue. For other tools the
fault reaches the runner, which starts the episode again; so does a crash of code, which would crash again.
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
    def __init__(self, inner: Environment, settings: ToolSettings):
        super().__init__(inner)
        self.settings = settings
        self.harmless = frozenset(tool.name for tool in inner.tools if tool.may_repeat)

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        return RetryingEpisode(self.inner.start(problem, stream=stream), self.settings, self.harmless)


class RetryingEpisode(EpisodeWrapper):
    """An immediate answer passes through; a Future is awaited, and the call repeated if it fails."""

    def __init__(self, inner: Episode, settings: ToolSettings, harmless: frozenset[str]):
        super().__init__(inner)
        self.settings, self.harmless = settings, harmless

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if name not in self.harmless or not self.settings.max_retries:
            return self.inner.call(name, arguments)
        try:
            answer = self.inner.call(name, arguments)
        except EnvironmentFault as fault:
            return background.run(self._call_again(name, arguments, fault))
        if isinstance(answer, Future):
            return background.run(self._await_answer(name, arguments, answer))
        return answer

    async def _await_answer(self, name: str, arguments: Mapping[str, Any], answer: Future[ToolReply]) -> ToolReply:
        try:
            return await asyncio.wrap_future(answer)
        except EnvironmentFault as fault:
            return await self._call_again(name, arguments, fault)

    async def _call_again(self, name: str, arguments: Mapping[str, Any], fault: EnvironmentFault) -> ToolReply:
        num_retries = 1
        while fault.may_pass and num_retries <= self.settings.max_retries:
            await asyncio.sleep(self.settings.backoff_seconds * 2 ** (num_retries - 1))
            try:
                answer = self.inner.call(name, arguments)
                reply = await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer
                return replace(reply, num_retries=reply.num_retries + num_retries)
            except EnvironmentFault as again:
                fault, num_retries = again, num_retries + 1
        fault.num_retries += num_retries - 1
        raise fault
