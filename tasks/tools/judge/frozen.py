"""A judge that a frozen model plays in this process, such as the base model that training starts from.

No vote is lost to its form: what is fixed of the answer is written for the model, which writes the reason and then
chooses among the values of each field by its own probabilities. So an answer is of the schema whatever the model, and
a model that cannot judge is found out by `judge-check` and not by its JSON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasks.models.folders import folder_hash
from tasks.tools.base import EnvironmentFault
from tasks.tools.frozen import FrozenModel, TooLong
from tasks.tools.judge.settings import JudgeSettings

ENDS_REASON = re.compile(r'["\\\x00-\x1f]')  # what JSON would have to escape
TRUTH, SHARES = (" true", " false"), tuple(f" {tenths / 10:.1f}" for tenths in range(11))
FIELDS = {"success": TRUTH, "score": SHARES, "soundness": SHARES}
VERDICT = '", "success": false, "score": 0.0, "soundness": 0.0}'  # as long as any after the reason


class FrozenJudge:
    """What a Judge asks."""

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.model = FrozenModel(Path(settings.model), temperature=settings.temperature, name="judge")

    async def answer(self, messages: list[dict[str, str]], *, seed: int) -> str:
        """EnvironmentFault where the episode has more tokens than the model reads; ValueError where the rules alone
        have.
        """
        return await self.model.run(lambda: self._answer(messages, seed))

    async def close(self) -> None:
        self.model.close()

    def _answer(self, messages: list[dict[str, str]], seed: int) -> str:
        try:
            draft = self.model.begin(messages, seed=seed, reserved=f'{{"reason": "{VERDICT}')
        except TooLong as found:
            raise self._refusal(messages, found) from None
        draft.add('{"reason": "')
        draft.write(max_tokens=self.settings.max_output_tokens, ends_before=ENDS_REASON)
        draft.add('"')
        for name, choices in FIELDS.items():
            draft.add(f', "{name}":')
            draft.choose(choices)
        return f"{draft.text}}}"

    def _refusal(self, messages: list[dict[str, str]], found: TooLong) -> Exception:
        rules = len(self.model.prompt_ids(messages[:1]))
        if rules < found.limit:
            return EnvironmentFault(
                f"an answer would need {found.num_tokens} tokens and it reads at most {found.limit}; lower "
                f"environment.judge.max_characters, or use a model with a longer context",
                tool="judge",
            )
        return ValueError(
            f"environment.judge.model: {self.settings.model} reads at most {found.limit} tokens and the rules of its "
            f"judge alone have {rules}, so it cannot judge. Shorten environment.judge.rubric, or use a model with a "
            f"longer context."
        )


def frozen_request(settings: JudgeSettings) -> dict[str, Any]:
    """All that an answer depends on beside messages and seed. ValueError where the folder does not exist."""
    folder = Path(settings.model)
    if not folder.is_dir():
        raise ValueError(
            f"environment.judge: url is null, and model {settings.model} is no folder, so there is no model to judge. "
            f"Name one that is there before the first stage, such as the folder of model.path, or set url."
        )
    return {
        "weights": folder_hash(folder),
        "temperature": settings.temperature,
        "max_output_tokens": settings.max_output_tokens,
    }
