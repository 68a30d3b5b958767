"""How a model's family writes tool calls: parsing and writing.

A model is asked in the form it was trained on: a form it must guess costs the success that RL starts from. HERMES is
for Qwen and Hermes models, LLAMA for Llama 3.1 to 3.3; RECIPE, explained in the prompt, works with any other. Text is
parsed as JSON, never evaluated; an unreadable call is None, which the environment answers, and no text raises. Stored
demonstrations contain Hermes text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.json_text import json_line
from tasks.core.records import ToolCall
from tasks.core.tool_calls import CLOSE, OPEN, as_call, between_tags, call_text, parse_calls

Calls = list[ToolCall | None]

PYTHON_TAG = "<|python_tag|>"  # Llama's mark before a call
OPENS_A_CALL = re.compile(r"\s*(\[\s*)?\{")
BETWEEN_CALLS = re.compile(r"[\s;]*")
MARKS_OF_A_CALL = {"name", "function", "parameters", "arguments"}

RECIPE_OPEN, RECIPE_CLOSE, FINISHED = "<tool>", "</tool>", "<TASK_FINISHED>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`calls` is None for each malformed call, empty for a closing message. `answer` is the inverse of `closing`."""

    name: str
    calls: Callable[[str], Calls]
    text: Callable[[Sequence[ToolCall]], str]
    closing: Callable[[str], str] = str
    answer: Callable[[str], str] = str

    def rewritten(self, stored: str) -> str:
        """A stored assistant text (Hermes) as a model of this format writes it."""
        if self.name == HERMES.name:
            return stored
        calls = [call for call in parse_calls(stored) if call is not None]
        return self.text(calls) if calls else self.closing(stored)


def _hermes_text(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_hermes_call(call) for call in calls)


def _hermes_call(call: ToolCall) -> str:
    body = call_text(call).removeprefix(OPEN).removesuffix(CLOSE)
    return f"{OPEN}{_without_tags(body, OPEN, CLOSE)}{CLOSE}"


def _llama_calls(text: str) -> Calls:
    """Calls in a message that is JSON from its first character, or after the tag. JSON without a call is an answer."""
    tagged, body = "", text
    if not OPENS_A_CALL.match(text):
        _, tagged, body = text.partition(PYTHON_TAG)
        if not tagged:
            return []
    values, is_whole = _json_values(body)
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    if not tagged and is_whole and not any(isinstance(item, dict) and MARKS_OF_A_CALL & item.keys() for item in items):
        return []
    calls = [as_call(item, keys=("parameters", "arguments")) for item in items]
    return calls if calls and is_whole else [*calls, None]


def _json_values(text: str) -> tuple[list[Any], bool]:
    decoder, values, position = json.JSONDecoder(), list[Any](), 0
    while (position := _end_of(BETWEEN_CALLS, text, position)) < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return values, False
        values.append(value)
    return values, True


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start


def _llama_text(calls: Sequence[ToolCall]) -> str:
    return "; ".join(json_line({"name": call.name, "parameters": call.arguments}) for call in calls)


def _recipe_calls(text: str) -> Calls:
    """A message with calls is not final even if it says so: it has not seen their replies."""
    bodies, is_whole = between_tags(text, RECIPE_OPEN, RECIPE_CLOSE)
    calls = [call for body in bodies for call in _recipe_list(body)]
    return calls if is_whole else [*calls, None]


def _recipe_list(body: str) -> Calls:
    values, is_whole = _json_values(body)
    if not is_whole or len(values) != 1 or values == [[]]:
        return [None]
    items = values[0] if isinstance(values[0], list) else values
    return [as_call(item, keys=("arguments", "args")) for item in items]


def _recipe_text(calls: Sequence[ToolCall]) -> str:
    body = json_line([{"name": call.name, "arguments": call.arguments} for call in calls])
    return f"{RECIPE_OPEN}{_without_tags(body, RECIPE_OPEN, RECIPE_CLOSE)}{RECIPE_CLOSE}"


def _recipe_closing(answer: str) -> str:
    return f"{answer}\n{FINISHED}"


def _recipe_answer(text: str) -> str:
    return text.replace(FINISHED, "").strip()


def _without_tags(body: str, *tags: str) -> str:
    return body.replace("<", r"\u003c") if any(tag in body for tag in tags) else body


def instructions(tools: Sequence[dict[str, Any]]) -> str:
    example = '[{"name": "tool_name", "arguments": {"argument_name": "value"}}]'
    return (
        "You can use tools. Each line here describes one of them in JSON:\n"
        + "\n".join(json_line(tool) for tool in tools)
        + "\n\nTo call tools, write a JSON list of the calls between tags, and nothing after it:\n"
        + f"{RECIPE_OPEN}{example}{RECIPE_CLOSE}\n"
        + "The next message holds their replies. A call that fails can be corrected and made again.\n"
        + f"When the request is fulfilled, write your answer to the user and then {FINISHED}"
    )


HERMES = CallFormat("hermes", parse_calls, _hermes_text)
LLAMA = CallFormat("llama", _llama_calls, _llama_text)
RECIPE = CallFormat("recipe", _recipe_calls, _recipe_text, _recipe_closing, _recipe_answer)
