"""A judge that a frozen model plays in this process, such as the base model that training starts from.

No vote is lost to its form: what is fixed of the answer is written for the model, which writes the reason and then
chooses among the values of each field by its own probabilities. So an answer is of the schema whatever the model, and
a model that cannot judge is found out by `judge-check` and not by its JSON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasks.tools.base import EnvironmentFault
from tasks.tools.chat_client import ChatAnswer
from tasks.tools.frozen import FrozenModel, TooLong, hash_weights
from tasks.tools.judge.settings import JudgeSettings

SETTING = "environment.judge"
ENDS_REASON = re.compile(r'["\\\x00-\x1f]')  # what JSON would have to escape
TRUTH, SHARES = (" true", " false"), tuple(f" {tenths / 10:.1f}" for tenths in range(11))
FIELDS = {"success": TRUTH, "score": SHARES, "soundness": SHARES}
BEGINNING = '{"reason": "'
VERDICT = '", "success": false, "score": 0.0, "soundness": 0.0}'  # as long as any after the reason


class FrozenJudge:
    """What a Judge asks."""

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.model = FrozenModel(Path(settings.model), temperature=settings.temperature, setting=SETTING)

    async def answer(self, messages: list[dict[str, str]], *, seed: int) -> ChatAnswer:
        """EnvironmentFault where the episode has more tokens than the model reads; ValueError where the rules alone
        leave no room.
        """
        return ChatAnswer(await self.model.run(lambda: self._answer(messages, seed)), "stop")

    async def close(self) -> None:
        self.model.close()

    def _answer(self, messages: list[dict[str, str]], seed: int) -> str:
        try:
            draft = self.model.begin(messages, seed=seed, reserved=BEGINNING + VERDICT)
        except TooLong as found:
            raise self._refusal(messages, found) from None
        draft.add(BEGINNING)
        draft.write(max_tokens=self.settings.max_output_tokens, ends_before=ENDS_REASON)
        draft.add('"')
        for name, choices in FIELDS.items():
            draft.add(f', "{name}":')
            draft.choose(choices)
        return f"{draft.text}}}"

    def _refusal(self, messages: list[dict[str, str]], found: TooLong) -> Exception:
        nothing = {"role": "user", "content": ""}
        rules = len(self.model.prompt_ids([messages[0], nothing]))
        if rules + len(self.model.chat.encode(BEGINNING + VERDICT)) < found.limit:
            return EnvironmentFault(
                f"an answer would need {found.num_tokens} tokens and it reads at most {found.limit}; lower "
                f"environment.judge.max_characters, or use a model with a longer context",
                tool="judge",
            )
        return ValueError(
            f"{SETTING}.model: {self.settings.model} reads at most {found.limit} tokens and the rules of its judge "
            f"alone have {rules}, which leaves no room for an episode and a verdict, so it cannot judge. Shorten "
            f"environment.judge.rubric, or use a model with a longer context."
        )


def frozen_request(settings: JudgeSettings) -> dict[str, Any]:
    """All that an answer depends on beside messages and seed. ValueError where the folder does not exist."""
    return {
        "weights": hash_weights(Path(settings.model), setting=SETTING),
        "temperature": settings.temperature,
        "max_output_tokens": settings.max_output_tokens,
    }
