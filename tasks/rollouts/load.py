"""Engines by name, built from params and a model folder; each engine's module is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.rollouts.chat import ChatFormat
from tasks.rollouts.engine import Engine
from tasks.rollouts.options import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_engine(
    model: PreTrainedModel, chat: ChatFormat, *, engine: EngineSettings, sampling: SamplingSettings
) -> Engine:
    """The engine of the profile over a model that stays the caller's: trained weights are generated with at once."""
    from tasks.rollouts.transformers_engine import TransformersEngine

    max_positions = getattr(model.config, "max_position_embeddings", None)
    if max_positions is not None and sampling.max_tokens_per_episode > max_positions:
        raise ValueError(
            f"sampling.max_tokens_per_episode is {sampling.max_tokens_per_episode} and the model's context is "
            f"{max_positions} tokens, so long episodes would run past it. Lower the setting to at most {max_positions}."
        )
    return TransformersEngine(
        model,
        end_of_turn=chat.end_of_turn,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_context=sampling.max_tokens_per_episode,
        max_concurrent_episodes=engine.max_concurrent_episodes,
    )
