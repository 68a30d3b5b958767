"""What the model wrote as an agent gets it: the message, its calls, its thought, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.chat.format import ChatFormat
from tasks.gateway.completions import CompletionRequest, FinishReason, ProtocolError, WrittenCall
from tasks.rollouts.agents.said import Said


@dataclass(frozen=True, slots=True)
class Answer:
    """`is_malformed`: it tried to call a tool and could not be read; then all that it wrote is its text."""

    text: str
    calls: tuple[WrittenCall, ...]
    thought: str | None
    finish: FinishReason
    is_malformed: bool

    @property
    def said(self) -> Said:
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return Said("assistant", self.text, calls, tuple(call.id for call in self.calls))


def read_answer(chat: ChatFormat, written: Sequence[int], request: CompletionRequest, *, name: str) -> Answer:
    """Of a turn's sampled ids, with its end if it has one. `name` begins the ids of its calls, and is unique.

    `tool_choice: none`: no call is read from the text.
    """
    is_ended = written[-1] in chat.end_ids
    found = chat.read_turn(written[:-1] if is_ended else written)
    tools = [dict(tool) for tool in request.tools]
    calls = [] if request.tool_choice == "none" else chat.calls(found.message, tools)
    is_malformed = any(call is None for call in calls)
    if is_malformed or not calls:
        finish: FinishReason = "stop" if is_ended else "length"
        text = found.message if is_malformed else chat.call_format.answer(found.message)
        return Answer(text, (), found.thought, finish, is_malformed)
    read = tuple(
        WrittenCall(f"{name}_{number}", call.name, call.arguments) for number, call in enumerate(calls) if call
    )
    return Answer(chat.call_format.prose(found.message), read, found.thought, "tool_calls", False)


def cut_at_stop(chat: ChatFormat, written: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many of the ids a turn has that ends with the first of the strings in its message, a thought before it left
    out; None: it has none of them.
    """
    start = chat.read_turn(written).num_thought_tokens
    if not any(text and text in chat.decode(list(written[start:])) for text in stop):
        return None
    low, high = start + 1, len(written)
    while low < high:
        middle = (low + high) // 2
        has_one = any(text in chat.decode(list(written[start:middle])) for text in stop)
        low, high = (low, middle) if has_one else (middle + 1, high)
    return low


def before_stop(answer: Answer, stop: Sequence[str]) -> Answer:
    """Without the stop string, as endpoints give it; calls before it count."""
    places = [place for text in stop if text and (place := answer.text.find(text)) >= 0]
    text = answer.text[: min(places)] if places else answer.text
    return replace(answer, text=text, finish="tool_calls" if answer.calls else "stop")


def refuse_response_schema(request: CompletionRequest) -> None:
    if request.response_schema is not None:
        message = "Answers cannot be held to a JSON schema while the policy is trained; ask for one in the prompt."
        raise ProtocolError(400, message, parameter="response_format", code="unsupported_parameter")
