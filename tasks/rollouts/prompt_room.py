"""Does every prompt leave room for a turn, does an episode fit the model's context, and could its user speak?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem
from tasks.models.limits import context_length
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment, Tool


def check_context(
    config: Mapping[str, Any], sampling: SamplingSettings, *, budget_key: str = "sampling.max_tokens_per_episode"
) -> None:
    """ValueError where an episode could exceed the context in the model's config.json."""
    max_positions = context_length(config)
    if max_positions is not None and sampling.max_tokens_per_episode > max_positions:
        raise ValueError(
            f"{budget_key} is {sampling.max_tokens_per_episode} and the model's context is "
            f"{max_positions} tokens, so long episodes would exceed it. Set it to at most {max_positions}."
        )


def check_prompts(
    chat: ChatFormat,
    config: Mapping[str, Any],
    environment: Environment,
    problems: Sequence[Problem],
    sampling: SamplingSettings,
    *,
    budget_key: str = "sampling.max_tokens_per_episode",
) -> None:
    """ValueError where an episode could exceed the context in the model's config.json, a prompt leaves no room, or the
    environment's user refuses a problem.

    `budget_key` is the key of params that the episode's budget is from.
    """
    check_context(config, sampling, budget_key=budget_key)
    longest, problem_id = 0, ""
    tools: tuple[Tool, ...] = ()
    schemas: list[dict[str, Any]] = []  # most problems show the tools of the one before
    for problem in problems:
        environment.check_user(problem)
        if (shown := environment.tools_for(problem)) is not tools:
            tools, schemas = shown, [tool.schema() for tool in shown]
        sampling.within(environment.budgets_for(problem))
        prompt_ids = chat.prompt_ids(problem.requests[0], schemas, environment.rules_for(problem))
        longest, problem_id = max((longest, problem_id), (len(prompt_ids), problem.id))
        for request in problem.requests[1:]:
            chat.request_ids(request)  # refuses a template that rewrites earlier text then
    if longest >= sampling.max_tokens_per_episode:
        raise ValueError(
            f"problem {problem_id!r}: its prompt has {longest} tokens, more than any other, and "
            f"{budget_key} is {sampling.max_tokens_per_episode}, so no turn fits. Set that to more "
            f"than {longest + sampling.max_tokens_per_turn}, or drop the problem."
        )
