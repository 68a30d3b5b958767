"""What the official clients make of a turn and send back by themselves is the turn that was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.clients import QUESTION, Client
from tests.gateway.scripted import MODEL, ScriptedBackend, turn

pytestmark = pytest.mark.slow
ROOM = {
    "type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"], "additionalProperties": False,
}  # fmt: skip
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
IDIOMS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda said: said,
    "model_dump": lambda said: said.model_dump(),
    "to_dict": lambda said: said.to_dict(),
}
WAYS = ["create", "parse", "stream"]


@pytest.fixture(autouse=True)
def written(backend: ScriptedBackend) -> None:
    backend.script = lambda request: turn("Let me see.", [("price", {"room": "attic"})], thought="Rooms have prices.")


def check_last(backend: ScriptedBackend) -> None:
    _, answered, replied = backend.requests[-1].messages
    assert (answered["content"], answered["reasoning_content"]) == ("Let me see.", "Rooms have prices.")
    assert [call["function"]["arguments"] for call in answered["tool_calls"]] == [{"room": "attic"}]
    assert (replied["role"], replied["content"]) == ("tool", "40")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_chat_completions(clients: dict[str, Any], backend: ScriptedBackend, way: str, idiom: str):
    completions = clients["chat"].client.chat.completions
    tools = [{"type": "function", "function": {"name": "price", "parameters": ROOM, "strict": True}}]
    given = {"model": MODEL, "messages": ASKED, "tools": tools}
    if way == "stream":
        with completions.stream(**given) as pieces:
            said = pieces.get_final_completion().choices[0].message
    else:
        said = getattr(completions, way)(**given).choices[0].message
    reply = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "40"}
    completions.create(model=MODEL, messages=[*ASKED, IDIOMS[idiom](said), reply], tools=tools)
    check_last(backend)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_responses(clients: dict[str, Any], backend: ScriptedBackend, way: str, idiom: str):
    responses = clients["responses"].client.responses
    tools = [{"type": "function", "name": "price", "parameters": ROOM, "strict": True}]
    given = {"model": MODEL, "input": ASKED, "tools": tools}
    if way == "stream":
        with responses.stream(**given) as pieces:
            output = pieces.get_final_response().output
    else:
        output = getattr(responses, way)(**given).output
    reply = {"type": "function_call_output", "call_id": output[-1].call_id, "output": "40"}
    responses.create(model=MODEL, input=[*ASKED, *map(IDIOMS[idiom], output), reply], tools=tools)
    check_last(backend)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_messages(clients: dict[str, Any], backend: ScriptedBackend, way: str, idiom: str):
    messages = clients["messages"].client.messages
    given = {
        "model": MODEL, "max_tokens": 9, "tools": [{"name": "price", "input_schema": ROOM}],
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    if way == "stream":
        with messages.stream(**given, messages=ASKED) as pieces:
            content = pieces.get_final_message().content
    else:
        content = getattr(messages, way)(**given, messages=ASKED).content
    reply = {"type": "tool_result", "tool_use_id": content[-1].id, "content": "40"}
    turns = [{"role": "assistant", "content": [IDIOMS[idiom](block) for block in content]}]
    messages.create(**given, messages=[*ASKED, *turns, {"role": "user", "content": [reply]}])
    check_last(backend)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("chat", {"stream_options": {"include_usage": None, "include_obfuscation": False}}),
        ("chat", {"messages": [{"role": "user", "content": QUESTION, "name": None, "unknown": None}]}),
        ("responses", {"reasoning": {"effort": None}}),
        ("messages", {"messages": [*ASKED, {"role": "assistant", "content": [
            {"type": "text", "text": "Hm.", "citations": []}]}, *ASKED]}),
    ],
)  # fmt: skip
def test_what_is_null_within_a_parameter_was_not_given(clients: dict[str, Client], name: str, changed: dict[str, Any]):
    assert clients[name].ask(**changed).text == "Let me see."


def test_a_null_in_a_call_and_in_a_schema_stays(clients: dict[str, Any], backend: ScriptedBackend):
    schema = {"type": "object", "properties": {"room": {"enum": ["attic", None], "default": None}}}
    used = [{"type": "tool_use", "id": "c", "name": "price", "input": {"room": None}}]
    reply = [{"type": "tool_result", "tool_use_id": "c", "content": "40"}]
    asked = [*ASKED, {"role": "assistant", "content": used}, {"role": "user", "content": reply}]
    clients["messages"].ask(messages=asked, tools=[{"name": "price", "input_schema": schema}])
    request = backend.requests[-1]
    assert request.tools[0]["function"]["parameters"] == schema
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"room": None}
