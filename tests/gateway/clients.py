"""One way to ask over three protocols: each with the client that its users have, whole or as a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tests.gateway.scripted import MODEL

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

QUESTION = "What is the attic?"
PRICE = {"type": "object", "properties": {"room": {"type": "string"}}}


@dataclass(frozen=True)
class Heard:
    """A turn as a client hears it; `reply` is in the client's own types."""

    text: str
    thought: str | None
    calls: list[tuple[str, str, Any]]
    was_cut: bool
    num_tokens: tuple[int, int, int]  # of the prompt, of it cached, written
    reply: Any


class Client(Protocol):
    def ask(self, *, stream: bool = False, **changed: Any) -> Heard: ...

    def go_on(self, heard: Heard, replies: list[str]) -> None:
        """Ask again: with the turn as it was heard, and a reply to each of its calls."""
        ...


class ChatClient:
    def __init__(self, client: OpenAI):
        self.client = client
        self.tools: list[Any] = [{"type": "function", "function": {"name": "price", "parameters": PRICE}}]
        self.question: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask(self, *, stream: bool = False, **changed: Any) -> Heard:
        given: dict[str, Any] = {"model": MODEL, "messages": self.question, "tools": self.tools, **changed}
        if stream:
            from openai import LengthFinishReasonError

            with self.client.chat.completions.stream(**given, stream_options={"include_usage": True}) as pieces:
                try:
                    reply: Any = pieces.until_done().get_final_completion()
                except LengthFinishReasonError as cut:
                    reply = cut.completion
        else:
            reply = self.client.chat.completions.create(**given)
            type(reply).model_validate(reply.model_dump())
        message, usage = reply.choices[0].message, reply.usage
        called = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        ]
        return Heard(
            message.content or "",
            getattr(message, "reasoning_content", None),
            called,
            reply.choices[0].finish_reason == "length",
            (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens),
            reply,
        )

    def go_on(self, heard: Heard, replies: list[str]) -> None:
        turn = heard.reply.choices[0].message.model_dump(exclude_none=True)
        told = [
            {"role": "tool", "tool_call_id": call[0], "content": reply}
            for call, reply in zip(heard.calls, replies, strict=True)
        ]
        self.ask(messages=[*self.question, turn, *told])


class ResponsesClient:
    def __init__(self, client: OpenAI):
        self.client = client
        self.tools: list[Any] = [{"type": "function", "name": "price", "parameters": PRICE, "strict": False}]
        self.question: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask(self, *, stream: bool = False, **changed: Any) -> Heard:
        given: dict[str, Any] = {"model": MODEL, "input": self.question, "tools": self.tools, **changed}
        if stream:
            with self.client.responses.stream(**given) as pieces:
                for piece in pieces:
                    reply: Any = getattr(piece, "response", None)
        else:
            reply = self.client.responses.create(**given)
            type(reply).model_validate(reply.model_dump(by_alias=True))
        thoughts = [item.content[0].text for item in reply.output if item.type == "reasoning"]
        called = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in reply.output
            if item.type == "function_call"
        ]
        usage = reply.usage
        return Heard(
            reply.output_text,
            thoughts[0] if thoughts else None,
            called,
            reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens",
            (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens),
            reply,
        )

    def go_on(self, heard: Heard, replies: list[str]) -> None:
        turn = [item.model_dump(exclude_none=True) for item in heard.reply.output]
        told = [
            {"type": "function_call_output", "call_id": call[0], "output": reply}
            for call, reply in zip(heard.calls, replies, strict=True)
        ]
        self.ask(input=[*self.question, *turn, *told])


class MessagesClient:
    def __init__(self, client: Anthropic):
        self.client = client
        self.tools: list[Any] = [{"name": "price", "input_schema": PRICE}]
        self.question: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask(self, *, stream: bool = False, **changed: Any) -> Heard:
        given: dict[str, Any] = {"model": MODEL, "messages": self.question, "tools": self.tools, "max_tokens": 9}
        given |= {"thinking": {"type": "adaptive"}, **changed}
        if stream:
            with self.client.messages.stream(**given) as pieces:
                reply: Any = pieces.get_final_message()
        else:
            reply = self.client.messages.create(**given)
            type(reply).model_validate(reply.model_dump())
        thoughts = [block.thinking for block in reply.content if block.type == "thinking"]
        called = [(block.id, block.name, block.input) for block in reply.content if block.type == "tool_use"]
        usage = reply.usage
        return Heard(
            "".join(block.text for block in reply.content if block.type == "text"),
            thoughts[0] if thoughts else None,
            called,
            reply.stop_reason == "max_tokens",
            (usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens, usage.output_tokens),
            reply,
        )

    def go_on(self, heard: Heard, replies: list[str]) -> None:
        turn = {"role": "assistant", "content": heard.reply.content}
        told = [
            {"type": "tool_result", "tool_use_id": call[0], "content": reply}
            for call, reply in zip(heard.calls, replies, strict=True)
        ]
        self.ask(messages=[*self.question, turn, {"role": "user", "content": told or "Go on."}])
