"""Chat completions, asked with the client of the package `openai`."""

from __future__ import annotations

import pytest

from tests.gateway.scripted import MODEL, turn

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "Hello?"}]
CALL = {"id": "call-0", "type": "function", "function": {"name": "price", "arguments": '{"room": "attic"}'}}
REPLY = {"role": "tool", "tool_call_id": "call-0", "content": [{"type": "text", "text": "40"}]}


def test_a_request_reaches_the_backend_in_plain_words(clients, backend):
    backend.script = lambda request: turn("Hello.")
    answered = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    clients["chat"].client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *HELLO, answered, REPLY],
        tools=[{"type": "function", "function": {"name": "price", "strict": True}}],
        stop="END",
        max_completion_tokens=9,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        user="somebody",
        store=False,
        parallel_tool_calls=True,
    )
    asked = backend.requests[-1]
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call-0", "type": "function", "function": {"name": "price", "arguments": {"room": "attic"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "call-0", "content": "40"},
    ]
    assert [tool["function"]["name"] for tool in asked.tools] == ["price"]
    assert (asked.stop, asked.max_tokens, asked.response_schema) == (["END"], 9, {"type": "object"})
    assert asked.temperature is None


@pytest.mark.parametrize(
    ("changed", "status", "parameter", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"n": 2}, 400, "n", "invalid_value"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias", "unsupported_parameter"),
        ({"store": True}, 400, "store", "unsupported_value"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls", "unsupported_value"),
        ({"extra_body": {"top_k": 3}}, 400, "top_k", "unknown_parameter"),
        ({"tool_choice": {"type": "function", "function": {"name": "price"}}}, 400, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.user.content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, *(
            "messages.0.user.content", "invalid_value")),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}, 400, "messages", "invalid_value"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, *HELLO]}, 400, "messages", "invalid_value"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL, CALL]}, REPLY]}, 400, *(
            "messages", "invalid_value")),
        ({"messages": [*HELLO, REPLY]}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, 413, None, "request_too_large"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_an_error_that_names_it(clients, backend, changed, status, parameter, code):
    num_requests = len(backend.requests)
    from openai import APIStatusError

    with pytest.raises(APIStatusError) as raised:
        clients["chat"].client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **changed})

    assert (raised.value.status_code, raised.value.param, raised.value.code) == (status, parameter, code)
    assert str(raised.value).endswith(".")
    assert len(backend.requests) == num_requests
