"""Tool calls as text: what an assistant message must look like to call a tool, written and parsed in one place.

The format is the Hermes one that Qwen models are trained on: one JSON object with `name` and `arguments` between
`<tool_call>` tags, any number of them in a message. A message without a tag is a closing message. What a model wrote is
data: it is parsed as JSON and never evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tasks.environments.base import Episode, ToolReply, wait
from tasks.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*" + re.escape(CLOSE), re.DOTALL)


def call_text(call: ToolCall) -> str:
    """The assistant message that makes one call."""
    return f"{OPEN}\n" + json.dumps({"name": call.name, "arguments": call.arguments}) + f"\n{CLOSE}"


def parse_calls(text: str) -> list[ToolCall | None]:
    """The calls in an assistant message, in order; None stands for one that is malformed. Empty: a closing message."""
    bodies = CALL.findall(text)
    calls = [_parse_call(body) for body in bodies]
    if text.count(OPEN) > len(bodies):
        calls.append(None)
    return calls


def _parse_call(body: str) -> ToolCall | None:
    try:
        return as_call(json.loads(body))
    except (ValueError, RecursionError):
        return None


def as_call(value: object) -> ToolCall | None:
    """The call a JSON value stands for; None where it is none, or holds what no file can: NaN, half a surrogate
    pair.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    return ToolCall.model_construct(name=value["name"], arguments=arguments) if isinstance(arguments, dict) else None


def answer_calls(episode: Episode, calls: list[ToolCall | None]) -> Iterator[ToolReply]:
    """The environment's reply to each call of one message, in order, waited for."""
    for call in calls:
        yield episode.malformed_call() if call is None else wait(episode.call(call.name, call.arguments))
