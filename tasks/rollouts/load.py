"""Engines by name, built from params and a model folder; each engine's module is imported only when it is asked for.

What can be refused before any weights are loaded is refused here: budgets the model's context cannot hold, and prompts
that leave no room for a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.environments.base import Environment, tools_for
from tasks.models import model_config
from tasks.records import Problem
from tasks.rollouts.chat import ChatFormat, load_chat
from tasks.rollouts.engine import Engine
from tasks.rollouts.options import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_checked_chat(
    folder: Path, environment: Environment, problems: Sequence[Problem], sampling: SamplingSettings
) -> ChatFormat:
    """The chat format of a model folder; ValueError where the tokenizer, the context or a prompt cannot work.

    Reads the tokenizer and config.json only.
    """
    chat = load_chat(folder)
    config = model_config(folder)
    config = config.get("text_config", config)
    max_positions = config.get("max_position_embeddings")
    if max_positions is not None and sampling.max_tokens_per_episode > max_positions:
        raise ValueError(
            f"sampling.max_tokens_per_episode is {sampling.max_tokens_per_episode} and the model's context is "
            f"{max_positions} tokens, so long episodes would run past it. Lower the setting to at most {max_positions}."
        )
    for problem in problems:
        tools = [tool.schema() for tool in tools_for(environment, problem)]
        num_tokens = len(chat.prompt_ids(problem.requests[0], tools))
        if num_tokens >= sampling.max_tokens_per_episode:
            raise ValueError(
                f"problem {problem.id!r}: its prompt has {num_tokens} tokens and sampling.max_tokens_per_episode is "
                f"{sampling.max_tokens_per_episode}, so no turn fits. Raise the limit or drop the problem."
            )
        for request in problem.requests[1:]:
            chat.request_ids(request)  # refuses a template that rewrites earlier text then
    return chat


def load_engine(
    model: PreTrainedModel, chat: ChatFormat, *, engine: EngineSettings, sampling: SamplingSettings
) -> Engine:
    """The engine of the profile over a model that stays the caller's: trained weights are generated with at once."""
    from tasks.rollouts.transformers_engine import TransformersEngine

    return TransformersEngine(
        model,
        end_of_turn=chat.end_of_turn,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_context=sampling.max_tokens_per_episode,
        max_concurrent_episodes=engine.max_concurrent_episodes,
    )
