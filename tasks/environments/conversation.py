"""Calls that are already known, played as one conversation: request by request, waited for, then judged.

`score` plays what somebody wrote down this way, and `baselines` what a world names beside any model. Nothing is tried
again here and nothing is caught: a fault of the environment is for the caller to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.environments.base import Environment, ToolReply, Verdict, wait
from tasks.records import Problem, ToolCall


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the calls of each request were answered, and how the whole was judged."""

    replies: list[list[ToolReply]]
    verdict: Verdict


def play_conversation(
    environment: Environment,
    problem: Problem,
    turns: Sequence[Sequence[ToolCall]],
    messages: Sequence[str | None],
    *,
    stream: str,
) -> Conversation:
    """Play the calls of each user request, from the first on; `messages` close the requests, one each."""
    replies: list[list[ToolReply]] = []
    episode = environment.start(problem, stream=stream)
    try:
        for number, calls in enumerate(turns):
            if number:
                episode.end_turn(messages[number - 1])
            replies.append([wait(episode.call(call.name, call.arguments)) for call in calls])
        return Conversation(replies, wait(episode.verdict(messages[len(turns) - 1])))
    finally:
        episode.close()
