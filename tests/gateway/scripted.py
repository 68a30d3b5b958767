"""A Backend and a ToolHost that do as they are told, for tests of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tasks.gateway.completions import Completion, CompletionRequest, FinishReason, ProtocolError, WrittenCall
from tasks.tools.base import Tool, ToolReply, error_text

KEY, MODEL = "key-of-episode-7", "policy"
PRICE = Tool("price", "What a room costs.", {"type": "object", "properties": {"room": {"type": "string"}}})


def turn(
    text: str = "",
    calls: Sequence[tuple[str, Mapping[str, Any]]] = (),
    *,
    thought: str | None = None,
    finish: FinishReason | None = None,
    stop_string: str | None = None,
) -> Completion:
    """A turn of three tokens after ten, four of which were cached."""
    return Completion(
        id="turn-1",
        model=MODEL,
        text=text,
        calls=[WrittenCall(f"call-{number}", name, dict(given)) for number, (name, given) in enumerate(calls)],
        finish=finish or ("tool_calls" if calls else "stop"),
        num_prompt_tokens=10,
        num_cached_tokens=4,
        token_ids=[5, 6, 7],
        logp=[-0.5, -0.25, 0.0],
        tokens=["a", "é", "c"],
        version="policy/3",
        thought=thought,
        num_thought_tokens=0 if thought is None else 2,
        stop_string=stop_string,
    )


class ScriptedBackend:
    """Notes each request and answers with `script`: a turn, an error, or None, which leaves its Future open."""

    def __init__(self, script: Callable[[CompletionRequest], Completion | Exception | None]):
        self.script = script
        self.requests: list[CompletionRequest] = []
        self.open: list[Future[Completion]] = []

    def models(self, key: str) -> Sequence[str]:
        if key != KEY:
            raise ProtocolError(401, "This key is of no episode that is being played.", code="invalid_api_key")
        return [MODEL]

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        self.requests.append(request)
        answer: Future[Completion] = Future()
        said = self.script(request)
        if said is None:
            self.open.append(answer)
        elif isinstance(said, Exception):
            answer.set_exception(said)
        else:
            answer.set_result(said)
        return answer


class ScriptedHost:
    """One tool, `price`; the cellar has none, which is an error reply."""

    def tools(self, key: str) -> Sequence[Tool]:
        if key != KEY:
            raise ProtocolError(401, "This key is of no episode that is being played.", code="invalid_api_key")
        return [PRICE]

    def call(self, key: str, name: str, arguments: Mapping[str, Any]) -> Future[ToolReply]:
        answer: Future[ToolReply] = Future()
        if arguments.get("room") == "cellar":
            answer.set_result(ToolReply(error_text("not_found", "no such room"), error="not_found"))
        else:
            answer.set_result(ToolReply(f"{arguments['room']}: 40"))
        return answer
