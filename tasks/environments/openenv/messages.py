"""What an OpenEnv server says, checked: messages of its WebSocket, observations, tools, and the text a model reads.

Protocol: the package `openenv` 0.10 (`core/env_server`). A message is `{"type": …, "data": …}`; the reply to `reset`
and `step` is an observation with a reward and `done`. The policy never reads the reward, nor `metadata`, which is for
whoever trains. Everything here comes from a server and is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.core import json_text
from tasks.core.secrets import Secrets
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, ErrorType, FaultType, Tool
from tasks.tools.layer import ToolError
from tasks.tools.mcp_content import content_text

MAX_MESSAGE_BYTES = 8 << 20
MAX_TOOLS, MAX_REASONS = 1000, 3
STEP = "step"  # the tool of a server whose actions are its own; OpenEnv forbids an MCP tool of that name
ENDED = "[The episode has ended.]"
TAKES_TOOL_CALLS = ("Action", "CallToolAction", "ListToolsAction")  # titles of actions that stand for MCP calls
METADATA = "metadata"
FAULT_OF_CODE: Mapping[str, FaultType] = {"CAPACITY_REACHED": "rate_limited"}
FAULT_OF_TOOL_ERROR: Mapping[str, FaultType] = {"timeout": "timeout", "transport_error": "unavailable"}
REFUSED_ARGUMENTS = ("invalid_args", -32602)


class BadAnswer(ValueError):
    """What the server said is not what the protocol has; the message continues "the server …"."""


class _Said(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Message(_Said):
    type: Literal["observation", "state", "mcp", "error"]
    data: dict[str, Any]


class Observed(_Said):
    """The reply to `reset` and `step`. `reward` is None where the server has not judged."""

    observation: dict[str, Any]
    reward: bool | int | float | None = None
    done: bool = False

    def text(self) -> str:
        """All the policy may read of it, as JSON; empty if there is nothing."""
        shown = {name: value for name, value in self.observation.items() if name != METADATA}
        return json_text.json_line(shown) if shown else ""


class Account(_Said):
    """What an error message tells."""

    message: str = ""
    code: str = ""
    errors: list[Any] = Field(default_factory=list)


class ListedTool(_Said):
    name: str = Field(min_length=1)
    description: str = ""
    input_schema: dict[str, Any] = Field(alias="inputSchema")

    model_config = ConfigDict(strict=True, frozen=True, populate_by_name=True)


@dataclass(frozen=True)
class Offer:
    """What a server is: its tools by name, and whether a call of an MCP tool is a step with a reward."""

    name: str
    version: str
    tools: dict[str, Tool]
    calls_are_steps: bool


def read(model: type[Any], value: Any, what: str) -> Any:
    """The value as the model has it. BadAnswer names `what` and the first flaw."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise BadAnswer(f"sent {what} that OpenEnv does not know ({one_line(place)}: {first['msg']})") from None


def read_message(raw: str | bytes, secrets: Secrets) -> Message:
    try:
        value = json_text.parse(raw)
    except ValueError as error:
        raise BadAnswer(f"sent what is no message of OpenEnv: {one_line(error)}") from None
    message: Message = read(Message, secrets.hide_in(value), "a message")
    return message


def fault_of(data: Mapping[str, Any], tool: str) -> EnvironmentFault:
    """A server that answers with an error of its own. An exception in its `step` is one too: an environment answers a
    bad action with an observation.
    """
    account: Account = read(Account, data, "an error")
    told = f": {one_line(account.message)}" if account.message else ""
    return EnvironmentFault(
        f"the server answered {one_line(account.code) or 'with an error'}{told}",
        tool=tool,
        type=FAULT_OF_CODE.get(account.code, "unavailable"),
    )


def refusal_of(data: Mapping[str, Any]) -> ToolError | None:
    """What the model reads where the server finds that an action does not fit; None if that is not what it says."""
    account: Account = read(Account, data, "an error")
    if account.code != "VALIDATION_ERROR":
        return None
    reasons = [str(error.get("msg", "")) for error in account.errors[:MAX_REASONS] if isinstance(error, dict)]
    return ToolError("invalid_arguments", "; ".join(map(one_line, reasons)) or "the action is not valid")


def read_tools(listed: Any, version: str) -> dict[str, Tool]:
    """MCP tools by name. BadAnswer if they are no tools, too many, or two have one name."""
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise BadAnswer(f"listed no tools, or more than {MAX_TOOLS:,}")
    tools: dict[str, Tool] = {}
    for item in listed:
        told: ListedTool = read(ListedTool, item, "a tool")
        if told.name in tools:
            raise BadAnswer(f"listed two tools called {one_line(told.name)!r}")
        description = told.description.strip() or told.name
        tools[told.name] = Tool(told.name, description, {"type": "object", **told.input_schema}, version=version)
    return tools


def step_tool(action: Mapping[str, Any], description: str, version: str) -> Tool:
    """The tool of a server whose actions are its own: the action's schema, without the metadata that all have."""
    properties = action.get("properties", {})
    if action.get("type") != "object" or not isinstance(properties, dict):
        raise BadAnswer("has actions whose schema is no object")
    shown = {name: schema for name, schema in properties.items() if name != METADATA}
    told = " ".join(str(part).strip() for part in (description, action.get("description", "")) if part)
    schema = {**action, "properties": shown}
    return Tool(STEP, told or "One action.", schema, version=version)


def tool_reply(observation: Mapping[str, Any], tool: str) -> str:
    """The text of an MCP call's result. ToolError if the tool refused the call, EnvironmentFault if it failed."""
    error = observation.get("error")
    if isinstance(error, dict):
        raise _tool_error(str(error.get("error_type", error.get("code", ""))), error, tool)
    return _result_text(observation.get("result"))


def rpc_reply(data: Mapping[str, Any], tool: str) -> str:
    """The same for a call that is no step: the JSON-RPC reply of the server."""
    error = data.get("error")
    if isinstance(error, dict):
        raise _tool_error(error.get("code"), error, tool)
    return _result_text(data.get("result"))


def _tool_error(kind: object, error: Mapping[str, Any], tool: str) -> Exception:
    message = str(error.get("message", ""))
    if kind == "tool_not_found":
        return EnvironmentFault("the server no longer has this tool", tool=tool)
    if isinstance(kind, str) and kind in FAULT_OF_TOOL_ERROR:
        return EnvironmentFault(f"the server answered: {one_line(message)}", tool=tool, type=FAULT_OF_TOOL_ERROR[kind])
    type: ErrorType = "invalid_arguments" if kind in REFUSED_ARGUMENTS else "conflict"
    return ToolError(type, message or "the call failed")


def _result_text(result: Any) -> str:
    """ToolError if the result is an error."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return result if isinstance(result, str) else json_text.json_line(result)
    blocks = [block for block in result["content"] if isinstance(block, dict)]
    text = content_text(blocks, result.get("data", result.get("structured_content")))
    if result.get("is_error", result.get("isError")):
        raise ToolError("conflict", text or "the call failed")
    return text
