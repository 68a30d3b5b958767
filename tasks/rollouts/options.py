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
    """The sampling distribution and the budgets that end an episode; token counts include prompt and tool replies."""

    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_tokens_per_episode: int = Field(ge=2)
