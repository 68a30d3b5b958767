"""Anthropic's messages: `POST /v1/messages`.

A thought is a block of type `thinking`, told if `thinking` is `adaptive`; a signature is the turn's id and is not
checked when it comes back. Source: the reference of the API, and the types of the package `anthropic` 2.10.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from tasks.gateway.completions import Completion, CompletionRequest, Message, ProtocolError, ToolChoice
from tasks.gateway.history import check_history, check_tools, written_call
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
    "metadata": COMMON_IGNORED["metadata"],
    "service_tier": COMMON_IGNORED["service_tier"],
    "cache_control": Ignored("a hint where prompts are cached, and no token depends on it"),
}
REFUSED = {
    "top_k": "log-probs are of the policy's own distribution",
    "container": "there is no container to run code in",
    "mcp_servers": "the agent itself calls its tools",
    "context_management": "the agent itself decides what stays in its history",
    "thread": "nothing is kept for the caller",
}
CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error",
}  # fmt: skip
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # `tool_runner` goes on without
NAMELESS_ERROR = "The tool failed and gave no message."
CacheControl = dict[str, Any] | None  # of any block; no token depends on it


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    citations: Empty = None
    parsed_output: Any = None  # what the client made of it
    cache_control: CacheControl = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: Names
    name: Names
    input: dict[str, Any]
    caller: Any = None
    cache_control: CacheControl = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Names
    content: Text = ""
    is_error: bool | None = None  # the text says so, where there is one
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        return self.content or (NAMELESS_ERROR if self.is_error else "")


def as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class UserMessage(Strict):
    role: Literal["user", "system"]
    content: Annotated[
        list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], BeforeValidator(as_blocks)
    ]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]],
        BeforeValidator(as_blocks),
    ]


class GivenTool(Strict):
    type: Literal["custom"] | None = None
    name: Names
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # whoever runs the tool checks the arguments
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None  # a stream has the finished turn
    cache_control: CacheControl = None


class GivenChoice(Strict):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: Literal[False] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def refuse_a_named_tool(cls, kind: Any) -> Any:
        if kind == "tool":
            raise ValueError("a named tool cannot be enforced; use auto, any or none")
        return kind


class Thinking(Strict):
    type: Literal["adaptive", "disabled"]
    display: Literal["summarized"] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def refuse_a_budget(cls, kind: Any) -> Any:
        if kind == "enabled":
            raise ValueError("a budget for thoughts is not the agent's to set here; use adaptive")
        return kind


class OutputConfig(Strict):
    class Format(Strict):
        type: Literal["json_schema"]
        schema_: dict[str, Any] = Field(alias="schema")

    format: Format | None = None


class MessagesRequest(Strict):
    model: Names
    max_tokens: Count
    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]], Field(min_length=1)
    ]
    system: Text | None = None
    tools: list[GivenTool] = Field(default_factory=list)
    tool_choice: GivenChoice = GivenChoice(type="auto")
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Share | None = None
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    stream: bool = False


def read(body: Mapping[str, Any]) -> Asked:
    given = check(MessagesRequest, body, ignored=IGNORED, refused=REFUSED)
    if given.messages[-1].role == "assistant":
        message = "messages: the last one is the assistant's own, and a turn cannot be prefilled; end with the user's."
        raise ProtocolError(400, message, parameter="messages", code="invalid_value")
    opening = [{"role": "system", "content": given.system}] if given.system else []
    request = CompletionRequest(
        model=given.model,
        messages=[*opening, *(message for spoken in given.messages for message in _canonical(spoken))],
        tools=[tool_schema(tool.name, tool.description, tool.input_schema) for tool in given.tools],
        tool_choice=CHOICES[given.tool_choice.type],
        stop=given.stop_sequences,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        response_schema=given.output_config.format.schema_ if given.output_config.format else None,
    )
    check_history(request.messages)
    check_tools(request.tools, request.tool_choice)
    return Asked(request, given, given.stream)


def _canonical(message: UserMessage | AssistantMessage) -> list[Message]:
    """An assistant's message is one; a user's is one per result, and one of the text between them."""
    if isinstance(message, AssistantMessage):
        return [_turn(message)]
    messages: list[Message] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
        elif messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] += f"\n{block.text}"
        else:
            messages.append({"role": message.role, "content": block.text})
    return messages


def _turn(message: AssistantMessage) -> Message:
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [
        written_call(block.id, block.name, block.input) for block in message.content if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": "\n".join(texts),
        **({"reasoning_content": "\n".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def write(asked: Asked, completion: Completion) -> dict[str, Any]:
    usage = _usage(completion, completion.num_written_tokens)
    return {**_head(completion), "content": _blocks(asked, completion), **_end(completion), "usage": usage}


def _end(completion: Completion) -> dict[str, Any]:
    if completion.finish == "stop" and completion.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_string}
    return {"stop_reason": STOP_REASONS[completion.finish], "stop_sequence": None}


def _head(completion: Completion) -> dict[str, Any]:
    head = {"id": completion.id, "type": "message", "role": "assistant", "model": completion.model}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _blocks(asked: Asked, completion: Completion) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if completion.thought is not None and asked.given.thinking.type == "adaptive":
        blocks.append({"type": "thinking", "thinking": completion.thought, "signature": completion.id})
    if completion.text:
        blocks.append({"type": "text", "text": completion.text})
    for call in completion.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _usage(completion: Completion, num_written_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": completion.num_prompt_tokens - completion.num_cached_tokens,
        "cache_read_input_tokens": completion.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_written_tokens,
    }


def events(asked: Asked, completion: Completion) -> Iterator[Event]:
    yield _event("message_start", message={**_head(completion), "usage": _usage(completion, 0)})
    for index, block in enumerate(_blocks(asked, completion)):
        empty, deltas = _pieces(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(completion), usage={"output_tokens": completion.num_written_tokens})
    yield _event("message_stop")


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what fills it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thought, signature]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _event(name: str, **data: Any) -> Event:
    return Event({"type": name, **data}, name)


def error(error: ProtocolError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": NO_THREADS} if error.parameter == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def error_event(error_: ProtocolError) -> Event:
    return Event(error(error_), "error")
