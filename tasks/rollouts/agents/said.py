"""Messages as they are compared: two that say the same are equal, however a client wrote them.

Clients parse the arguments of calls and write them anew, send null for an empty message, drop thoughts, give calls
other ids. None of that changes what was said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call
from tasks.gateway.completions import Message, ProtocolError

ROLES = {"system", "user", "assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Said:
    """One message. `calls` have name and arguments; `ids` are the calls' own, which a client may have changed."""

    role: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    ids: tuple[str, ...] = ()

    def is_same(self, other: Said) -> bool:
        """A client may leave out what a message says beside its calls."""
        if self.role != other.role:
            return False
        if self.role != "assistant":
            return self.text == other.text
        if self.calls != other.calls and not (self.ids and self.ids == other.ids and _names(self) == _names(other)):
            return False
        texts = {self.text.strip(), other.text.strip()}
        return len(texts) == 1 or (bool(self.calls) and "" in texts)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall.model_construct(name=name, arguments=arguments) for name, arguments in self.calls]

    @property
    def message(self) -> Message:
        return {"role": self.role, "content": self.text}


def read_messages(messages: Sequence[Message]) -> list[Said]:
    """Messages of one assistant that follow each other are one. ProtocolError where one is none of chat completions."""
    said: list[Said] = []
    for number, message in enumerate(messages):
        one = _read(message, f"messages[{number}]")
        if one.role == "assistant" and said and said[-1].role == "assistant":
            text = "\n\n".join(filter(None, (said[-1].text, one.text)))
            said[-1] = Said("assistant", text, said[-1].calls + one.calls, said[-1].ids + one.ids)
        elif one.role != "system" or one.text:
            said.append(one)
    return said


def shared_length(one: Sequence[Said], other: Sequence[Said]) -> int:
    """How many messages both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, pair in enumerate(pairs) if not pair[0].is_same(pair[1])), min(len(one), len(other)))


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False)


def _read(message: Message, where: str) -> Said:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ProtocolError(400, f"{where} has a role that no chat template knows", parameter=where)
    if content is not None and not isinstance(content, str):
        raise ProtocolError(400, f"the content of {where} is no text", parameter=where)
    fields = message.get("tool_calls") or [] if role == "assistant" else []
    calls = [_read_call(field, where) for field in fields]
    ids = tuple(str(field.get("id") or "") for field in fields)
    return Said(role, content or "", tuple((call.name, call.arguments) for call in calls), ids)


def _read_call(field: Any, where: str) -> ToolCall:
    call = as_call(field.get("function")) if isinstance(field, dict) else None
    if call is None:
        raise ProtocolError(400, f"a call in {where} has no name, or arguments that are no object", parameter=where)
    return call


def _names(said: Said) -> list[str]:
    return [name for name, _ in said.calls]
