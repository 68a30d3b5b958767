"""A user behind any OpenAI-compatible endpoint. The `openai` client asks and retries.

An endpoint that stays down, or answers with no message, is an environment fault: the episode starts again, then it is
dropped, never rewarded. One that refuses the key or the model ends the run; one that has answered may refuse a single
message (403, 404).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.core import background
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, FaultType
from tasks.tools.chat_client import Role, connect, fault_type, raise_refusal
from tasks.tools.user.played import Message
from tasks.tools.user.settings import UserModelSettings

if TYPE_CHECKING:
    from openai import OpenAIError

USER = Role("environment.user.model", "speak", "no user can speak", "set environment.user to null")


class EndpointSpeaker:
    """A Speaker."""

    def __init__(self, settings: UserModelSettings):
        self.settings = settings
        self.client, self.secrets = connect(settings, USER)
        self.has_answered = False

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
        self.has_answered = True
        return self.secrets.hide(said)

    def close(self) -> None:
        background.run(self.client.close()).result()

    def _after(self, error: OpenAIError) -> EnvironmentFault:
        raise_refusal(error, self.settings, USER, self.secrets, has_answered=self.has_answered)
        type = fault_type(error)
        if type == "timeout":
            return self._fault(f"no answer in {self.settings.timeout_seconds:g} s", type)
        return self._fault(f"the endpoint failed: {error} {error.__cause__ or ''}", type)

    def _fault(self, message: str, type: FaultType) -> EnvironmentFault:
        return EnvironmentFault(one_line(self.secrets.hide(message)), tool="user", type=type)
