"""One question to the judge's endpoint by the `openai` client, which repeats a failed request within `max_retries` and
waits as long as Retry-After says. What still fails is an environment fault of the tool "judge". An endpoint that
refuses the key or the model ends the run; one that has answered may refuse a single episode (403, 404).
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, Field

from tasks.core import json_text
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, FaultType
from tasks.tools.chat_client import Role, connect, fault_type, raise_refusal
from tasks.tools.judge.opinion import answer_schema
from tasks.tools.judge.settings import JudgeSettings

JUDGE = Role("environment.judge", "judge", "no episode can be judged", "set environment.judge to null")


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class JudgeClient:
    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.client, self.secrets = connect(settings, JUDGE)
        self.has_answered = False
        self._free = asyncio.Semaphore(settings.max_concurrent_requests)

    async def answer(self, messages: list[dict[str, str]], *, seed: int) -> str | None:
        """The text of the answer. EnvironmentFault where the endpoint fails or sends no chat completion; ValueError
        where it refuses the key or the model.
        """
        from openai import OpenAIError

        request = {**request_options(self.settings), "messages": messages, "seed": seed}
        try:
            async with self._free:
                answer = await self.client.chat.completions.with_raw_response.create(**request)
        except OpenAIError as error:
            raise_refusal(error, self.settings, JUDGE, self.secrets, has_answered=self.has_answered)
            raise self.fault(f"the endpoint failed: {error} {error.__cause__ or ''}", fault_type(error)) from None
        try:
            completion = _Completion.model_validate(json_text.parse(answer.content))
        except ValueError:
            sent = answer.content.decode("utf-8", "replace")
            raise self.fault(f"its answer is no chat completion: {sent!r}") from None
        self.has_answered = True
        said = completion.choices[0].message.content
        return None if said is None else self.secrets.hide(said)

    def fault(self, message: str, type: FaultType = "unavailable") -> EnvironmentFault:
        return EnvironmentFault(one_line(self.secrets.hide(message)), tool="judge", type=type)

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
