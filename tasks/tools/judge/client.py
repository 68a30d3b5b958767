"""One question to the judge's endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from tasks.tools.chat_client import ChatAnswer, ChatClient, Role
from tasks.tools.judge.opinion import answer_schema
from tasks.tools.judge.settings import JudgeSettings

JUDGE = Role("judge", "environment.judge", "judge", "no episode can be judged", "set environment.judge to null")


class JudgeClient:
    """What a Judge asks."""

    def __init__(self, settings: JudgeSettings):
        self.settings, self.client = settings, ChatClient(settings, JUDGE)
        self._free = asyncio.Semaphore(settings.max_concurrent_requests)

    async def answer(self, messages: list[dict[str, str]], *, seed: int) -> ChatAnswer:
        request = {**request_options(self.settings), "messages": messages, "seed": seed}
        async with self._free:
            return await self.client.ask(request)

    async def close(self) -> None:
        await self.client.close()


def request_options(settings: JudgeSettings) -> dict[str, Any]:
    """All of a request that is the same for every episode. A server without schemas also has the older name of the
    limit on tokens.
    """
    common = {"model": settings.model, "temperature": settings.temperature}
    if not settings.structured:
        return {**common, "max_tokens": settings.max_output_tokens}
    schema = {"name": "opinion", "strict": True, "schema": answer_schema()}
    response_format = {"type": "json_schema", "json_schema": schema}
    return {**common, "max_completion_tokens": settings.max_output_tokens, "response_format": response_format}
