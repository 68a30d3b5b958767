"""One contract over the three protocols, each asked with the client of its own package."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType

import pytest

from tasks.gateway.completions import Completion, ProtocolError
from tests.gateway.clients import QUESTION
from tests.gateway.scripted import MODEL, turn

CALLS = [("price", {"room": "attic"}), ("price", {"room": "été"})]
TURNS = {
    "text": turn("The attic is 40."),
    "a call": turn(calls=CALLS[:1]),
    "text and several calls": turn("Let me see.", CALLS),
    "a thought": turn("40.", thought="Rooms have prices."),
    "a thought and a call": turn(calls=CALLS[:1], thought="Rooms have prices."),
    "cut": turn("The at", finish="length"),
    "nothing": turn(""),
}


@pytest.fixture
def sdk(client) -> ModuleType:
    """The client's own package, imported by the first test that needs it: two cost seconds."""
    return importlib.import_module("anthropic" if type(client).__name__ == "MessagesClient" else "openai")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TURNS)
def test_a_turn_is_heard_as_it_was_written_and_a_stream_says_the_same(client, backend, kind):
    backend.script = lambda request: TURNS[kind]
    whole, streamed = client.ask(), client.ask(stream=True)

    written = TURNS[kind]
    calls = [(call.id, call.name, call.arguments) for call in written.calls]
    for heard in (whole, streamed):
        assert (heard.text, heard.thought, heard.calls) == (written.text, written.thought, calls)
        assert heard.was_cut == (written.finish == "length")
        assert heard.num_tokens == (10, 4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "text and several calls", "a thought and a call"])
def test_a_turn_that_comes_back_is_the_turn_that_was_written(client, backend, kind):
    backend.script = lambda request: TURNS[kind]
    heard, written = client.ask(), TURNS[kind]
    client.go_on(heard, ["40" for _ in heard.calls])

    asked, answered, *replies = backend.requests[-1].messages
    assert asked == {"role": "user", "content": QUESTION}
    assert answered["content"] == written.text
    assert answered.get("reasoning_content") == written.thought
    assert answered.get("tool_calls", []) == [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in written.calls
    ]
    told = [{"role": "tool", "tool_call_id": call.id, "content": "40"} for call in written.calls]
    assert [reply for reply in replies if reply["role"] == "tool"] == told


@pytest.mark.slow
def test_an_error_is_raised_by_the_client_as_its_kind_with_one_sentence(client, backend, sdk):
    backend.script = lambda request: ProtocolError(429, "The episode has no turns left.", code="max_turns")
    with pytest.raises(sdk.RateLimitError, match="The episode has no turns left"):
        client.ask()
    with pytest.raises(sdk.RateLimitError, match="no turns left"):
        client.ask(stream=True)

    backend.script = lambda request: KeyError("/home/somebody/secret")
    with pytest.raises(sdk.InternalServerError, match="KeyError") as raised:
        client.ask()
    assert "secret" not in str(raised.value)

    with pytest.raises(sdk.NotFoundError, match="this key may use policy"):
        client.ask(model="other")
    with pytest.raises(sdk.BadRequestError, match="Unknown parameter: beam_width"):
        client.ask(extra_body={"beam_width": 4})

    client.client.api_key, key = "another", client.client.api_key
    try:
        with pytest.raises(sdk.AuthenticationError):
            client.ask()
    finally:
        client.client.api_key = key


@pytest.mark.slow
def test_a_slow_stream_stays_alive_and_ends_with_the_turn_or_with_an_error(client, backend, sdk):
    def later(finish: Callable[[Future[Completion]], None]) -> None:
        backend.script = lambda request: None
        threading.Timer(0.3, lambda: finish(backend.open.pop())).start()  # six comments of 0.05 s

    later(lambda future: future.set_result(TURNS["text"]))
    assert client.ask(stream=True).text == "The attic is 40."
    later(lambda future: future.set_exception(ProtocolError(409, "The episode is over.")))
    with pytest.raises(sdk.APIError, match="The episode is over"):
        client.ask(stream=True)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "send the whole history"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (
            "responses",
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
            "no unanswered call",
        ),
        ("messages", {"extra_body": {"top_k": 5}}, "top_k cannot be honoured"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "use adaptive"),
        ("messages", {"tool_choice": {"type": "tool", "name": "price"}}, "cannot be enforced"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ("messages", {"messages": [{"role": "assistant", "content": "It is"}]}, "prefilled"),
    ],
)
def test_what_a_protocol_has_and_cannot_be_had_here_is_said(clients, backend, name, changed, words):
    import anthropic
    import openai

    num_requests = len(backend.requests)
    with pytest.raises((anthropic.BadRequestError, openai.BadRequestError), match=words):
        clients[name].ask(**changed)
    assert len(backend.requests) == num_requests


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_is_told_which_stop_sequence_ended_a_message_and_a_call_is_still_a_call(clients, backend, stream):
    told = {
        "stop_sequence": turn("It is ", stop_string="END"),
        "tool_use": turn("It is ", CALLS[:1], stop_string="END"),
        "end_turn": turn("It is."),
    }
    for reason, written in told.items():
        backend.script = lambda request, written=written: written
        reply = clients["messages"].ask(stream=stream, stop_sequences=["END"]).reply
        assert (reply.stop_reason, reply.stop_sequence) == (reason, "END" if reason == "stop_sequence" else None)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_asks_for_a_thread_and_goes_on_without(clients, backend, stream):
    from anthropic import beta_tool

    @beta_tool
    def price(room: str) -> str:
        """What a room costs."""
        return f"{room}: 40"

    def say(request):
        return turn("40.") if request.messages[-1]["role"] == "tool" else turn(calls=CALLS[:1])

    backend.script = say
    question = [{"role": "user", "content": QUESTION}]
    runner = clients["messages"].client.beta.messages.tool_runner(
        model="policy", max_tokens=9, messages=question, tools=[price], stream=stream
    )
    heard = [piece.get_final_message() if stream else piece for piece in runner]
    assert [message.stop_reason for message in heard] == ["tool_use", "end_turn"]
    assert backend.requests[-1].messages[-1]["content"] == "attic: 40"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "is_error", "read"), [("", True, "The tool failed"), ("Full.", True, "Full."), ("", False, "")]
)
def test_a_tool_that_failed_without_a_word_is_seen_by_the_model(clients, backend, content, is_error, read):
    backend.script = lambda request: turn("Hm.")
    used = [{"type": "tool_use", "id": "c", "name": "price", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error}]
    asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": used}]
    clients["messages"].ask(messages=[*asked, {"role": "user", "content": result}])
    told = backend.requests[-1].messages[-1]["content"]
    assert told.startswith(read) and bool(told) == bool(read)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "messages"])
def test_both_clients_list_the_models_and_find_one(clients, name):
    import anthropic
    import openai

    models = clients[name].client.models
    assert [model.id for model in models.list()] == [MODEL]
    assert models.retrieve(MODEL).id == MODEL
    if name == "messages":
        found = models.retrieve(MODEL)
        assert (found.display_name, found.type, found.created_at.year) == (MODEL, "model", 1970)
    with pytest.raises((anthropic.NotFoundError, openai.NotFoundError), match="this key may use policy") as missing:
        models.retrieve("other/model")
    assert vars(missing.value)["body"]["type"] == ("error" if name == "messages" else "not_found_error")


@pytest.mark.slow
def test_instructions_and_schemas_reach_the_backend_from_each_protocol(clients, backend):
    backend.script = lambda request: turn("{}")
    schema = {"type": "object"}
    json_schema = {"type": "json_schema", "name": "x", "schema": schema}
    clients["responses"].ask(instructions="Be brief.", tool_choice="required", text={"format": json_schema})
    clients["messages"].ask(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "any"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    clients["chat"].ask(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    for asked in backend.requests[-3:]:
        assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        assert (asked.tool_choice, asked.response_schema) == ("required", schema)
