"""OpenAI's chat completions: `POST /v1/chat/completions`.

Source: the reference of the API, and the types of the package `openai` 3.51. A thought is `reasoning_content`, as
vLLM's and DeepSeek's endpoints call it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.gateway.completions import Completion, CompletionRequest, Message, ProtocolError, ToolChoice, WrittenCall
from tasks.gateway.history import call_arguments, check_history, check_tools, has_arguments, written_call
from tasks.gateway.wire import (
    COMMON_IGNORED,
    Asked,
    Count,
    Empty,
    Event,
    Ignored,
    Names,
    Share,
    Strict,
    Text,
    check,
    tool_schema,
)

IGNORED = {
    **COMMON_IGNORED,
    "user": Ignored("a label of the caller's own"),
    "safety_identifier": Ignored("a label of the caller's own"),
    "store": Ignored("nothing is kept for the caller", (False,)),
    "prompt_cache_key": Ignored("a hint where prompts are cached, and no token depends on it"),
    "prompt_cache_options": Ignored("a hint how prompts are cached, and no token depends on it"),
    "prompt_cache_retention": Ignored("a hint how long prompts are cached, and no token depends on it"),
    "modalities": Ignored("the model writes text", (["text"],)),
    "frequency_penalty": Ignored("the policy is sampled as it is", (0,)),
    "presence_penalty": Ignored("the policy is sampled as it is", (0,)),
    "verbosity": Ignored("the prompt says how much to write", ("medium",)),
}
REFUSED = {
    "logit_bias": "log-probs are of the policy's own distribution",
    "audio": "the model reads and writes text alone",
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "reasoning_effort": "the model's template decides whether it thinks",
    "prediction": "the engine writes every token itself",
    "web_search_options": "there is no search but the agent's own tools",
}
ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    429: "rate_limit_error",
}  # fmt: skip


class GivenFunction(Strict):
    name: Names
    arguments: Annotated[str, AfterValidator(has_arguments)]
    parsed_arguments: Any = None  # what the client made of them


class GivenCall(Strict):
    id: Names
    type: Literal["function"] = "function"
    function: GivenFunction
    index: int | None = None  # some clients send back what a stream's pieces had


class Spoken(Strict):
    role: Literal["system", "developer", "user"]
    content: Text
    name: str | None = None  # templates have no place for it


class Answered(Strict):
    role: Literal["assistant"]
    content: Text = ""
    tool_calls: list[GivenCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Empty = None
    parsed: Any = None  # what the client made of the content


class Replied(Strict):
    role: Literal["tool"]
    content: Text
    tool_call_id: Names
    name: str | None = None


class GivenTool(Strict):
    class Function(Strict):
        name: Names
        description: str | None = None
        parameters: dict[str, Any] | None = None
        strict: bool | None = None  # whoever runs the tool checks the arguments, and says what is wrong

    type: Literal["function"]
    function: Function


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against listeners, of no use on one machine


class JsonSchema(Strict):
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _schema_of_text(given: ResponseFormat | None) -> Mapping[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    if given.json_schema is None:
        raise ProtocolError(400, "Missing required parameter: response_format.json_schema.")
    return given.json_schema.schema_


def choice_word(choice: Any) -> Any:
    if isinstance(choice, dict):
        raise ValueError("a named tool cannot be enforced; use auto, none or required")
    return choice


def as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Stops = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list), Field(max_length=16)]
Choice = Annotated[ToolChoice, BeforeValidator(choice_word)]


class ChatRequest(Strict):
    model: Names
    messages: Annotated[list[Annotated[Spoken | Answered | Replied, Field(discriminator="role")]], Field(min_length=1)]
    tools: list[GivenTool] = Field(default_factory=list)
    tool_choice: Choice = "auto"
    stop: Stops = Field(default_factory=list)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    seed: int | None = None
    n: Literal[1] = 1
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


def read(body: Mapping[str, Any]) -> Asked:
    given = check(ChatRequest, body, ignored=IGNORED, refused=REFUSED)
    request = CompletionRequest(
        model=given.model,
        messages=[_canonical(message) for message in given.messages],
        tools=[
            tool_schema(tool.function.name, tool.function.description, tool.function.parameters) for tool in given.tools
        ],
        tool_choice=given.tool_choice,
        stop=given.stop,
        max_tokens=given.max_completion_tokens or given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        seed=given.seed,
        response_schema=_schema_of_text(given.response_format),
        wants_logprobs=given.logprobs,
    )
    check_history(request.messages)
    check_tools(request.tools, request.tool_choice)
    return Asked(request, given, given.stream)


def _canonical(message: Spoken | Answered | Replied) -> Message:
    if isinstance(message, Replied):
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    if isinstance(message, Spoken):
        return {"role": "user" if message.role == "user" else "system", "content": message.content}
    thought = message.reasoning_content or message.reasoning
    calls = [
        written_call(call.id, call.function.name, call_arguments(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    return {
        "role": "assistant",
        "content": message.content,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def write(asked: Asked, completion: Completion) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": completion.text if completion.text or not completion.calls else None,
        "refusal": None,
        **({} if completion.thought is None else {"reasoning_content": completion.thought}),
        **({"tool_calls": [_call(call) for call in completion.calls]} if completion.calls else {}),
    }
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": completion.finish,
        "logprobs": _logprobs(asked, completion),
    }
    return {**_head(completion, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def events(asked: Asked, completion: Completion) -> Iterator[Event]:
    head = _head(completion, "chat.completion.chunk")

    def piece(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return Event({**head, "choices": [choice]})

    yield piece({"role": "assistant", "content": ""})
    if completion.thought is not None:
        yield piece({"reasoning_content": completion.thought})
    if completion.text:
        yield piece({"content": completion.text})
    for index, call in enumerate(completion.calls):
        yield piece({"tool_calls": [{"index": index, **_call(call)}]})
    yield piece({}, completion.finish, _logprobs(asked, completion))
    if asked.given.stream_options.include_usage:
        yield Event({**head, "choices": [], "usage": _usage(completion)})
    yield Event("[DONE]")


def error(error: ProtocolError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.parameter, "code": error.code}}


def error_event(error_: ProtocolError) -> Event:
    return Event(error(error_))


def _head(completion: Completion, object: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": object,
        "created": int(time.time()),
        "model": completion.model,
        "system_fingerprint": completion.version,
    }


def _call(call: WrittenCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_written_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_written_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": completion.num_thought_tokens},
    }


def _logprobs(asked: Asked, completion: Completion) -> dict[str, Any] | None:
    return {"content": token_logprobs(completion), "refusal": None} if asked.request.wants_logprobs else None


def token_logprobs(completion: Completion) -> list[dict[str, Any]]:
    """Every sampled token, those of thoughts and calls too, in nats."""
    return [
        {"token": token, "logprob": logp, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logp in zip(completion.tokens, completion.logp, strict=True)
    ]
