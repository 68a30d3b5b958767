"""What the wire protocols have in common: a request for one assistant turn, the turn, and what may go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tasks.tools.base import Tool, ToolReply

Message = dict[str, Any]
ToolChoice = Literal["auto", "none", "required"]
FinishReason = Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One assistant turn that an agent asks for.

    `messages` are those of chat completions, whatever the protocol: roles system, user, assistant and tool; `content` a
    string; calls as `tool_calls: [{"id", "type", "function": {"name", "arguments"}}]` with the arguments as an object;
    replies name their call in `tool_call_id`; a thought that the agent sends back is in `reasoning_content`. Every call
    has its reply, which no other message comes before. `tools` are schemas as `Tool.schema()` gives them, each name
    once. `max_tokens`: of the turn. `response_schema`: JSON Schema that the turn's text must fit. None, and empty,
    where the agent says nothing.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    response_schema: Mapping[str, Any] | None = None
    wants_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of the turn. `id` is unique within the episode, and its reply names it; `arguments` are an object."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One assistant turn. `text` is its message without its calls, `thought` what came before it, None where the model
    wrote none. `token_ids` and `logp` (nats) are of the sampled tokens, of which `num_thought_tokens` are the thought.
    `version` says which policy wrote it. `ignored` are parameters of the request in whose place the policy's own were
    used. `stop_string`: the one of the request that ended the message, which is not in `text`.
    """

    id: str
    model: str
    text: str
    calls: Sequence[WrittenCall]
    finish: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: Sequence[int]
    logp: Sequence[float]
    version: str
    thought: str | None = None
    tokens: Sequence[str] = field(default=())  # the text of each of `token_ids`
    num_thought_tokens: int = 0
    stop_string: str | None = None
    ignored: Sequence[str] = ()

    @property
    def num_written_tokens(self) -> int:
        return len(self.token_ids)


class ProtocolError(Exception):
    """A request that is not answered, in the words and with the status (HTTP) that every protocol has for it."""

    def __init__(self, status: int, message: str, *, parameter: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.parameter, self.code = status, message, parameter, code


class Backend(Protocol):
    """Writes the turns. `key` is the bearer key of the request, empty where it has none. ProtocolError, also in the
    Future; any other error is a fault of ours, told to the agent as status 500. Both are called on the server's event
    loop, so they return at once.
    """

    def models(self, key: str) -> Sequence[str]:
        """The names that a request may give; ProtocolError 401 for a wrong key."""
        ...

    def complete(self, key: str, request: CompletionRequest) -> Future[Completion]:
        """A cancelled Future says that nobody waits for the turn any more; setting its result would raise."""
        ...


class ToolHost(Protocol):
    """The tools that an agent of `key` may call over MCP. ProtocolError 401 for a wrong key."""

    def tools(self, key: str) -> Sequence[Tool]: ...

    def call(self, key: str, name: str, arguments: Mapping[str, Any]) -> Future[ToolReply]: ...
