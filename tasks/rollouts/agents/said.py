"""Messages as they are compared: two that say the same are equal, however a client wrote them.

Clients parse the arguments of calls and write them anew, send null for an empty message, drop thoughts, give calls
other ids. None of that changes what was said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from tasks.core.records import ToolCall
from tasks.core.tool_calls import as_call
from tasks.gateway.completions import Message, ProtocolError

ROLES = {"system", "user", "assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Said:
    """One message. `calls` have name and arguments; `ids` are the calls' own, which a client may have changed; of a
    tool's message, the id that it says it answers. `number`: which of the calls before it that is. `written_calls`: the
    calls as text, equal for equal ones.
    """

    role: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    ids: tuple[str, ...] = ()
    number: int = 0
    written_calls: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "written_calls", _canonical(self.calls) if self.calls else "")

    def is_sent_as(self, other: Said) -> bool:
        """Whether `other` is this message as a client sends it, who may leave out what it says beside its calls."""
        if self.role != other.role:
            return False
        if self.role != "assistant":
            return self.text == other.text
        if self.written_calls != other.written_calls:
            return False
        return other.text.strip() == self.text.strip() or bool(other.calls and not other.text.strip())

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall.model_construct(name=name, arguments=arguments) for name, arguments in self.calls]

    @property
    def message(self) -> Message:
        return {"role": self.role, "content": self.text}


def read_messages(messages: Sequence[Message]) -> list[Said]:
    """Messages of one assistant that follow each other are one, and replies are in the order of the calls that they
    answer. ProtocolError where one is none of chat completions.
    """
    read = [_read(message, f"messages[{number}]") for number, message in enumerate(messages)]
    said: list[Said] = []
    for role, block in groupby((one for one in read if one.role != "system" or one.text), key=lambda one: one.role):
        run = list(block)
        if role == "assistant":
            said.append(_join(run))
        else:
            said += _in_order_of_calls(said[-1].ids if said else (), run) if role == "tool" else run
    return said


def prefix_hashes(said: Sequence[Said]) -> list[int]:
    """Of each message with all before it, by Python's own hash, which a text keeps and no other process can foresee;
    equal ones were sent as each other.
    """
    last, hashes = 0, list[int]()
    for message in said:
        text = message.text.strip() if message.role == "assistant" else message.text
        hashes.append(last := hash((last, message.role, text, message.written_calls)))
    return hashes


def shared_length(known: Sequence[Said], sent: Sequence[Said], *, start: int) -> int:
    """How many messages both begin with; the first `start` are known to be the same."""
    shorter = min(len(known), len(sent))
    return next((place for place in range(start, shorter) if not known[place].is_sent_as(sent[place])), shorter)


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
    ids = [str(field.get("id") or "") for field in fields]
    if role == "tool":
        ids = [str(message.get("tool_call_id") or "")]
    return Said(role, content or "", tuple((call.name, call.arguments) for call in calls), tuple(ids))


def _read_call(field: Any, where: str) -> ToolCall:
    call = as_call(field.get("function")) if isinstance(field, dict) else None
    if call is None:
        raise ProtocolError(400, f"a call in {where} has no name, or arguments that are no object", parameter=where)
    return call


def _join(run: Sequence[Said]) -> Said:
    """Answers in a row as one, in one step: calls are written as JSON for each Said."""
    if len(run) == 1:
        return run[0]
    text = "\n\n".join(filter(None, (one.text for one in run)))
    calls = chain.from_iterable(one.calls for one in run)
    ids = chain.from_iterable(one.ids for one in run)
    return Said("assistant", text, tuple(calls), tuple(ids))


def _in_order_of_calls(calls: Sequence[str], replies: list[Said]) -> list[Said]:
    """By the ids of the calls before them; where those do not tell each reply its call, in the order they came in."""
    ids = [reply.ids[0] for reply in replies]
    place = {call: number for number, call in enumerate(calls)}
    is_told = len(place) == len(calls) and len({*ids}) == len(ids) and {*ids} <= place.keys()
    numbers = [place[id] for id in ids] if is_told else range(len(ids))
    numbered = [replace(reply, number=number) for reply, number in zip(replies, numbers, strict=True)]
    return sorted(numbered, key=lambda reply: reply.number)


def _canonical(calls: Sequence[tuple[str, Any]]) -> str:
    """As JSON, in which true is not 1. Whole numbers are written alike: JavaScript writes 1.0 as 1."""
    read = json.loads(json.dumps(calls), parse_float=_as_whole)
    return json.dumps(read, sort_keys=True)


def _as_whole(written: str) -> float:
    number = float(written)
    return int(number) if number.is_integer() else number
