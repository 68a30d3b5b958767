"""The expert of the invented world: the reference solution, with a look into a wrong document now and then.

Without such a detour, a model that once opened a wrong document would have no example of going on. Where some citations
are enough, it cites the last document alone, which has the answer: each id to copy is one more to get wrong.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tasks.core.records import Demonstration, ToolCall
from tasks.core.tool_calls import call_text
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import block_until

DETOUR_PROBABILITY = 0.1  # after a search, once per episode at most


def demonstrate(episode: ToolEpisode, rng: random.Random, *, cites_all: bool) -> Demonstration:
    """Play the reference on a new episode, with detours drawn from the stream."""
    problem = episode.problem
    texts, replies = list[str](), list[list[str]]()

    def play(call: ToolCall) -> dict[str, Any]:
        texts.append(call_text(call))
        replies.append([block_until(episode.call(call.name, call.arguments)).text])
        found: dict[str, Any] = json.loads(replies[-1][0])
        return found

    [turn] = problem.reference
    calls = turn.calls if cites_all else [*turn.calls[:-1], _cite_the_last(turn.calls[-1])]
    may_detour = True
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        reply = play(call)
        wrong = _wrong_results(reply, following) if call.name == "search" and following else []
        if may_detour and wrong and rng.random() < DETOUR_PROBABILITY:
            may_detour = False
            play(ToolCall(name="open", arguments={"document": rng.choice(wrong)}))
    return Demonstration(
        problem_id=problem.id,
        request=problem.requests[0],
        assistant_texts=[*texts, turn.answer],
        replies=[*replies, []],
    )


def _wrong_results(reply: dict[str, Any], following: ToolCall) -> list[str]:
    ids = [result["document"] for result in reply["results"]]
    return [id for id in ids if id != following.arguments["document"]]


def _cite_the_last(answer: ToolCall) -> ToolCall:
    return ToolCall(name="answer", arguments={**answer.arguments, "citations": answer.arguments["citations"][-1:]})
