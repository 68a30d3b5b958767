"""The expert: the reference solution by the numbers of documents, with a look into a wrong one now and then.

Without such a detour, a model that once opened a wrong document would have no example of going on. Where some citations
of the invented world are enough, it cites the last document alone, which has the answer.
"""

from __future__ import annotations

import random

from tasks.core.records import Demonstration, ToolCall
from tasks.core.tool_calls import call_text
from tasks.environments.research.episode import ResearchEpisode
from tasks.tools.base import block_until

DETOUR_PROBABILITY = 0.1  # after a search, once per episode at most


def demonstrate(episode: ResearchEpisode, rng: random.Random, *, cites_all: bool) -> Demonstration | None:
    """Play the reference on a new episode, with detours drawn from the stream; None where one of its calls fails or
    names a document that no reply has shown, or the user has several requests.
    """
    problem = episode.problem
    if len(problem.reference) > 1:
        return None
    [turn] = problem.reference
    texts, replies = list[str](), list[list[str]]()
    all_valid = True

    def play(call: ToolCall) -> None:
        nonlocal all_valid
        reply = block_until(episode.call(call.name, call.arguments))
        all_valid = all_valid and reply.valid
        texts.append(call_text(call))
        replies.append([reply.text])

    calls = turn.calls if cites_all else [*turn.calls[:-1], _cite_the_last(turn.calls[-1])]
    may_detour = True
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        numbered = _by_number(call, episode)
        if numbered is None:
            return None
        play(numbered)
        wrong = _wrong_results(call, following, episode)
        if may_detour and wrong and rng.random() < DETOUR_PROBABILITY:
            may_detour = False
            play(ToolCall(name="open", arguments={"document": rng.choice(wrong)}))
    if not all_valid:
        return None
    return Demonstration(
        problem_id=problem.id,
        request=problem.requests[0],
        assistant_texts=[*texts, turn.answer],
        replies=[*replies, []],
    )


def _by_number(call: ToolCall, episode: ResearchEpisode) -> ToolCall | None:
    """References name documents by their ids, which hold for any search; an agent has their numbers. None where one
    has no number yet.
    """
    arguments = dict(call.arguments)
    if "document" in arguments:
        arguments["document"] = _number(arguments["document"], episode)
    if "citations" in arguments:
        arguments["citations"] = [_number(document, episode) for document in arguments["citations"]]
    is_unknown = None in (arguments.get("document", 0), *arguments.get("citations", ()))
    return None if is_unknown else ToolCall(name=call.name, arguments=arguments)


def _number(document: int | str, episode: ResearchEpisode) -> int | None:
    return episode.number_of(document) if isinstance(document, str) else document


def _wrong_results(call: ToolCall, following: ToolCall | None, episode: ResearchEpisode) -> list[int]:
    """The numbers of what a search found and the next call does not open."""
    if call.name != "search" or following is None or following.name != "open":
        return []
    right = _number(following.arguments["document"], episode)
    return [number for number in episode.numbers_found(call.arguments["query"]) if number != right]


def _cite_the_last(answer: ToolCall) -> ToolCall:
    return ToolCall(name="answer", arguments={**answer.arguments, "citations": answer.arguments["citations"][-1:]})
