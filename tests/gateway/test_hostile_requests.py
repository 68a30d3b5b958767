"""Whatever a request has in whatever place, it is read or refused in one sentence: nothing else is ever raised."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.gateway.completions import CompletionRequest, ProtocolError
from tasks.gateway.protocols import chat, messages, responses
from tests.gateway.clients import PRICE

pytestmark = pytest.mark.slow

CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"room": "attic"}'}}
TEXT = {"type": "text", "text": "And the attic?"}
SOUND: dict[Any, dict[str, Any]] = {
    chat: {
        "model": "policy",
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "40"},
        ],
        "tools": [{"type": "function", "function": {"name": "price", "parameters": PRICE}}],
        "stop": ["END"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    },
    responses: {
        "model": "policy",
        "input": [
            {"role": "user", "content": "And the attic?"},
            {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "price", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "40"},
        ],
        "tools": [{"type": "function", "name": "price", "parameters": PRICE}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "include": [],
    },
    messages: {
        "model": "policy",
        "max_tokens": 9,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": "And the attic?"},
            {"role": "assistant", "content": [TEXT, {"type": "tool_use", "id": "c1", "name": "price", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [TEXT]}]},
        ],
        "tools": [{"name": "price", "input_schema": PRICE}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "adaptive"},
    },
}
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "x", "{", "user"])
)
KEYS = st.sampled_from(["type", "text", "role", "content", "id", "schema", "n"])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("protocol", SOUND, ids=lambda protocol: protocol.__name__.rpartition(".")[2])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_request_with_anything_anywhere_is_read_or_refused(protocol: Any, data: st.DataObject):
    assert isinstance(protocol.read(SOUND[protocol]).request, CompletionRequest)
    body = copy.deepcopy(SOUND[protocol])
    container, key = data.draw(st.sampled_from(list(places(body))))
    container[key] = data.draw(JSON)
    try:
        asked = protocol.read(body)
    except ProtocolError as refused:
        error = refused
    else:
        assert all(isinstance(message["content"], str) for message in asked.request.messages)
        return
    assert (error.status, "\n" in error.message, len(error.message) < 500) == (400, False, True)
    json.dumps(protocol.error(error))
