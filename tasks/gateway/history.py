"""What every conversation must keep, whatever protocol it came in: calls have replies, and replies answer calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core import json_text
from tasks.gateway.completions import Message, ProtocolError, ToolChoice


def check_history(messages: Sequence[Message]) -> None:
    """ProtocolError 400 where a call has no reply, a reply answers no call, or two calls of a message share an id."""
    waiting: set[str] = set()
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                _refuse(
                    f"answers {message['tool_call_id']!r:.80}, which is no unanswered call of the turn before", number
                )
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            _refuse(f"comes before the replies to {', '.join(sorted(waiting)):.200}", number)
        ids = [call["id"] for call in message.get("tool_calls", ())]
        waiting = set(ids)
        if len(waiting) < len(ids):
            _refuse("makes two calls with one id", number)
    if waiting:
        _refuse(f"is the last one, and {', '.join(sorted(waiting)):.200} has no reply yet", len(messages) - 1)


def check_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> None:
    """ProtocolError 400 where two tools share a name, or a call is required and there is no tool."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ProtocolError(400, "tools: two tools have the same name.", parameter="tools", code="invalid_value")
    if choice == "required" and not tools:
        message = "tool_choice requires a call, and there are no tools; give tools, or leave it out."
        raise ProtocolError(400, message, parameter="tool_choice", code="invalid_value")


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call that an agent sends back; empty text has none. ValueError if they are not an object."""
    try:
        arguments = json_text.parse(text) if text else {}
    except ValueError as error:
        raise ValueError(f"the arguments of a call are not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are JSON, but not an object")
    return arguments


def has_arguments(text: str) -> str:
    """For validators: the text itself, if `call_arguments` can read it."""
    call_arguments(text)
    return text


def written_call(id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call as an assistant message has it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _refuse(what: str, number: int) -> None:
    message = f"messages: number {number} {what}; send each call with its replies after it."
    raise ProtocolError(400, message, parameter="messages", code="invalid_value")
