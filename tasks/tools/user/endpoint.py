"""A user behind any OpenAI-compatible endpoint.

An endpoint that stays down, or answers with no whole message, is an environment fault: the episode starts again, then
it is dropped, never rewarded. One that refuses the key or the model ends the run; one that has answered may refuse a
single message.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core import background
from tasks.tools.chat_client import ChatClient, Role
from tasks.tools.user.played import Message, explain_cut
from tasks.tools.user.settings import UserModelSettings

USER = Role("user", "environment.user.model", "speak", "no user can speak", "set environment.user to null")


class EndpointSpeaker:
    """A Speaker."""

    def __init__(self, settings: UserModelSettings):
        self.settings, self.client = settings, ChatClient(settings, USER)

    async def say(self, messages: Sequence[Message], *, seed: str) -> str:
        """No seed is sent: few endpoints honour one."""
        answer = await self.client.ask(
            {
                "model": self.settings.model,
                "messages": list(messages),
                "temperature": self.settings.temperature,
                "max_completion_tokens": self.settings.max_output_tokens,
            }
        )
        if answer.finish_reason == "length":
            raise self.client.fault(explain_cut(self.settings.max_output_tokens))
        if answer.finish_reason == "content_filter":
            raise self.client.fault("a filter of its endpoint cut its message")
        if answer.text is None:
            raise self.client.fault("its answer has no message")
        return answer.text

    def close(self) -> None:
        background.run(self.client.close()).result()
