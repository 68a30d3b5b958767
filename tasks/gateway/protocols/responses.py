"""OpenAI's responses: `POST /v1/responses`, as the OpenAI Agents SDK speaks it.

Nothing is kept for the caller, so a conversation is sent whole: `previous_response_id` is an error. A thought is an
item of type `reasoning` with its text in the open. Source: the reference of the API, and the types of `openai` 3.51.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tasks.gateway.completions import Completion, CompletionRequest, Message, ProtocolError
from tasks.gateway.history import call_arguments, check_history, check_tools, has_arguments, written_call
from tasks.gateway.protocols import chat
from tasks.gateway.wire import Asked, Count, Event, Ignored, Names, Share, Strict, Text, check, tool_schema

OF_CHAT = (
    "metadata", "service_tier", "parallel_tool_calls", "user", "safety_identifier", "store", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
IGNORED = {
    **{name: chat.IGNORED[name] for name in OF_CHAT},
    "truncation": Ignored("no history is cut here", ("disabled",)),
    "background": Ignored("the caller waits for its turn", (False,)),
}
REFUSED = {
    "previous_response_id": "nothing is kept for the caller, so send the whole history as input",
    "conversation": "nothing is kept for the caller, so send the whole history as input",
    "prompt": "no prompts are kept here",
    "max_tool_calls": "the agent itself counts its calls",
    "reasoning": "the model's template decides whether it thinks",
    "context_management": "the agent itself decides what stays in its history",
}
State = str | None  # what an item that is sent back has beside its contents


class SpokenItem(Strict):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    id: State = None
    status: State = None
    phase: State = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: Names
    name: Names
    arguments: Annotated[str, AfterValidator(has_arguments)]
    parsed_arguments: Any = None  # what the client made of them
    id: State = None
    status: State = None


class ReplyItem(Strict):
    type: Literal["function_call_output"]
    call_id: Names
    output: Text
    id: State = None
    status: State = None


class ThoughtItem(Strict):
    class Part(Strict):
        type: Literal["reasoning_text", "summary_text"]
        text: str

    type: Literal["reasoning"]
    content: list[Part] | None = None
    summary: list[Part] = Field(default_factory=list)
    id: State = None
    status: State = None
    encrypted_content: State = None

    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


def as_typed(item: Any) -> Any:
    """A message may leave its type out."""
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[SpokenItem | CallItem | ReplyItem | ThoughtItem, Field(discriminator="type")], BeforeValidator(as_typed)
]


def as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Strict):
    type: Literal["function"]
    name: Names
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # whoever runs the tool checks the arguments


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(Strict):
    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Strict):
    model: Names
    input: Annotated[list[Item], BeforeValidator(as_items), Field(min_length=1)]
    instructions: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: chat.Choice = "auto"
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Literal[0] = 0
    text: TextSettings = TextSettings()
    # A thought is sent in the open, which serves those who ask for it encrypted.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    stream: bool = False
    stream_options: chat.StreamOptions = chat.StreamOptions()


def read(body: Mapping[str, Any]) -> Asked:
    given = check(ResponsesRequest, body, ignored=IGNORED, refused=REFUSED)
    opening = [{"role": "system", "content": given.instructions}] if given.instructions is not None else []
    request = CompletionRequest(
        model=given.model,
        messages=[*opening, *_messages(given.input)],
        tools=[tool_schema(tool.name, tool.description, tool.parameters) for tool in given.tools],
        tool_choice=given.tool_choice,
        max_tokens=given.max_output_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        response_schema=_schema_of_text(given.text.format),
        wants_logprobs="message.output_text.logprobs" in given.include,
    )
    check_history(request.messages)
    check_tools(request.tools, request.tool_choice)
    return Asked(request, given, given.stream)


def _schema_of_text(given: TextFormat) -> Mapping[str, Any] | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    if given.schema_ is None:
        raise ProtocolError(400, "Missing required parameter: text.format.schema.", parameter="text.format.schema")
    return given.schema_


def _messages(items: Sequence[SpokenItem | CallItem | ReplyItem | ThoughtItem]) -> list[Message]:
    """A thought, a message and its calls are one turn, in this order, as `write` gives them."""
    messages: list[Message] = []
    for item in items:
        turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item:
            case ReplyItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case ThoughtItem():
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.text()})
            case CallItem():
                if turn is None:
                    messages.append(turn := {"role": "assistant", "content": ""})
                call = written_call(item.call_id, item.name, call_arguments(item.arguments))
                turn.setdefault("tool_calls", []).append(call)
            case SpokenItem(role="assistant"):
                if turn is None or turn["content"] or "tool_calls" in turn:
                    messages.append(turn := {"role": "assistant", "content": ""})
                turn["content"] = item.content
            case SpokenItem():
                role = "user" if item.role == "user" else "system"
                messages.append({"role": role, "content": item.content})
    return messages


def write(asked: Asked, completion: Completion) -> dict[str, Any]:
    return _response(asked, completion, _items(asked, completion), is_done=True)


def _response(
    asked: Asked, completion: Completion, output: Sequence[Mapping[str, Any]], *, is_done: bool
) -> dict[str, Any]:
    given: ResponsesRequest = asked.given
    was_cut = completion.finish == "length"
    return {
        "id": completion.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": ("incomplete" if was_cut else "completed") if is_done else "in_progress",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut and is_done else None,
        "instructions": given.instructions,
        "metadata": {"turnwise_version": completion.version},
        "model": completion.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "max_output_tokens": given.max_output_tokens,
        "tool_choice": given.tool_choice,
        "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in given.tools],
        "text": {"format": given.text.format.model_dump(by_alias=True, exclude_none=True)},
        "usage": _usage(completion) if is_done else None,
    }


def _items(asked: Asked, completion: Completion) -> list[dict[str, Any]]:
    status = "incomplete" if completion.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if completion.thought is not None:
        part = {"type": "reasoning_text", "text": completion.thought}
        items.append({"type": "reasoning", "id": f"rs_{completion.id}", "summary": [], "content": [part]})
    if completion.text or not completion.calls:
        logprobs = chat.token_logprobs(completion) if asked.request.wants_logprobs else []
        text = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": logprobs}
        head = {"type": "message", "id": f"msg_{completion.id}", "role": "assistant", "status": status}
        items.append({**head, "content": [text]})
    for call in completion.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        head = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        items.append({**head, "name": call.name, "arguments": arguments})
    return items


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.num_written_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.num_thought_tokens},
        "total_tokens": completion.num_prompt_tokens + completion.num_written_tokens,
    }


def events(asked: Asked, completion: Completion) -> Iterator[Event]:
    for number, (name, data) in enumerate(_numbered(asked, completion)):
        yield Event({"type": name, "sequence_number": number, **data}, name)


def _numbered(asked: Asked, completion: Completion) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(asked, completion, [], is_done=False)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(asked, completion)):
        yield from _item_events(item, {"output_index": index})
    whole = write(asked, completion)
    yield f"response.{whole['status']}", {"response": whole}


def _item_events(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """An item is told empty, then filled, then whole."""
    empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    yield "response.output_item.added", {**at, "item": {**item, **empty, "status": "in_progress"}}
    of_item = {**at, "item_id": item["id"]}
    for index, part in enumerate(item.get("content", ())):
        here = {**of_item, "content_index": index}
        name = f"response.{part['type']}"
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        without: dict[str, Any] = {name: [] for name in logprobs}
        yield "response.content_part.added", {**here, "part": {**part, "text": "", **without}}
        yield f"{name}.delta", {**here, "delta": part["text"], **logprobs}
        yield f"{name}.done", {**here, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**here, "part": part}
    if "arguments" in item:
        yield "response.function_call_arguments.delta", {**of_item, "delta": item["arguments"]}
        arguments = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**of_item, **arguments}
    yield "response.output_item.done", {**at, "item": item}


error = chat.error


def error_event(error_: ProtocolError) -> Event:
    """With the words of both places in which clients look for them."""
    told = {"code": error_.code, "message": error_.message, "param": error_.parameter, "sequence_number": 0}
    return Event({"type": "error", **told, **error(error_)}, "error")
