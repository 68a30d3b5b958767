"""A user whom a frozen model plays in this process, such as the base that training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.tools.base import EnvironmentFault
from tasks.tools.frozen import FrozenModel, TooLong, hash_weights
from tasks.tools.user.played import Message, explain_cut
from tasks.tools.user.settings import UserModelSettings

SETTING = "environment.user.model"


class FrozenSpeaker:
    """A Speaker."""

    def __init__(self, settings: UserModelSettings):
        self.settings = settings
        self.model = FrozenModel(Path(settings.model), temperature=settings.temperature, setting=SETTING)

    async def say(self, messages: Sequence[Message], *, seed: str) -> str:
        given = list(messages)
        return await self.model.run(lambda: self._write(given, seed))

    def close(self) -> None:
        self.model.close()

    def _write(self, messages: Sequence[Message], seed: str) -> str:
        """How long a conversation gets is up to the agent, so it costs the episode; rules that never fit cost the
        run.
        """
        try:
            draft = self.model.begin(messages, seed=seed)
        except TooLong as found:
            if any(message["role"] == "assistant" for message in messages):
                raise EnvironmentFault(
                    f"the conversation has {found.num_tokens} tokens and it reads at most {found.limit}", tool="user"
                ) from None
            raise ValueError(
                f"{SETTING}: {self.settings.model} reads at most {found.limit} tokens and what its user "
                f"knows has {found.num_tokens}, so it cannot speak. Use a model with a longer context."
            ) from None
        if not draft.write(max_tokens=self.settings.max_output_tokens):
            most = min(self.settings.max_output_tokens, draft.room)
            raise EnvironmentFault(explain_cut(most), tool="user")
        return draft.text


def hash_user(settings: UserModelSettings) -> str:
    """ValueError where the folder does not exist."""
    return hash_weights(Path(settings.model), setting=SETTING)
