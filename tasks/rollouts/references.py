"""A problem's reference solution as the messages of an episode: one call each, then what closes the request."""

from __future__ import annotations

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem


def reference_messages(chat: ChatFormat, problem: Problem) -> list[list[int]]:
    """The ids of each turn with its end, as a demonstration is learnt; a model that thinks gets empty thoughts."""
    messages = []
    for turn in problem.reference:
        for call in turn.calls:
            given, written = chat.written_ids(chat.call_format.text([call]))
            messages.append([*given, *written, chat.end_of_calls])
        given, written = chat.written_ids(chat.call_format.closing(turn.answer))
        messages.append([*given, *written, chat.end_of_turn])
    return messages
