"""Settings of generation: which engine, how it samples, and the budgets of an episode. Free of heavy imports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.settings import Settings


class EngineSettings(Settings):
    """The engine that generates, and how many episodes it holds at once."""

    name: Literal["transformers"]
    max_concurrent_episodes: int = Field(ge=1)


class SamplingSettings(Settings):
    """The sampling distribution and the budgets that end an episode.

    `max_tokens_per_episode` counts the prompt and tool replies too; `max_completion_tokens` everything after the
    prompt, where prompts are long and differ (null: no such limit). `max_turns` is of the whole episode.
    """

    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_tokens_per_episode: int = Field(ge=2)
    max_completion_tokens: int | None = Field(ge=1)

    def token_limit(self, num_prompt_tokens: int) -> int:
        """The tokens an episode may have, its prompt included."""
        if self.max_completion_tokens is None:
            return self.max_tokens_per_episode
        return min(self.max_tokens_per_episode, num_prompt_tokens + self.max_completion_tokens)
