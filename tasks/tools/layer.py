"""The tool layer under every environment: checks arguments, formats errors, limits time and size.

A handler in memory is called directly; one that waits (`async def` or `blocking=True`) has a time limit and answers by
a Future. A wrong call gets the reply `{"error": {"type": ..., "message": ...}}`; a failure of ours raises
EnvironmentFault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel

from tasks.core import background
from tasks.core.json_text import check_writable
from tasks.core.passing_faults import is_of_a_file, may_pass, members
from tasks.core.text import one_line
from tasks.core.tool_calls import SHAPE
from tasks.tools.base import Answer, EnvironmentFault, ErrorType, FaultType, Tool, ToolReply, error_text
from tasks.tools.schemas import MAX_REASON_CHARACTERS, ArgumentSchema
from tasks.tools.settings import ToolSettings
from tasks.tools.watch import watched

TYPES: tuple[ErrorType, ...] = get_args(ErrorType)
OURS: tuple[FaultType, ...] = ("rate_limited", "timeout", "unavailable")
Kind = Literal["memory", "async", "blocking"]
Wording = Callable[[ErrorType, str, str], str]  # (type, tool or "", message) → text of the reply


class ToolError(Exception):
    """Raised by a handler to answer with the error envelope.

    `invalid_arguments`, `unknown_tool`, `not_found` and `conflict` blame the call and reach the model. The other types
    are environment faults, unless `scripted`: then they reach the model too. ValueError for a type that there is not.
    """

    def __init__(self, type: ErrorType, message: str, *, scripted: bool = False):
        if type not in TYPES:
            raise ValueError(
                f"ToolError has no type {type!r:.60}, so nobody could say whether the call or the tool was at fault. "
                f"Choose one of {', '.join(TYPES)}"
            )
        super().__init__(message)
        self.type, self.message, self.scripted = type, message, scripted


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool and its function: `handler(episode, arguments)` returns text, JSON or a ToolReply. An `async` handler with
    `own_clock` applies the time limit itself.
    """

    tool: Tool
    handler: Callable[[Any, Mapping[str, Any]], Any]
    kind: Kind
    own_clock: bool = False


def as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that can be sent to a server; ToolError where JSON has no such value."""
    try:
        check_writable(arguments)
    except (ValueError, RecursionError):
        raise ToolError("invalid_arguments", "they hold what JSON cannot") from None
    return dict(arguments)


def envelope(type: ErrorType, tool: str, message: str) -> str:
    return error_text(type, message)


class ToolLayer:
    """The tools of one environment. `validation: report` marks an invalid call and makes it anyway."""

    def __init__(
        self,
        tools: Sequence[BoundTool],
        settings: ToolSettings,
        *,
        validation: Literal["reject", "report"] = "reject",
        wording: Wording = envelope,
    ):
        self.settings, self.validation, self.wording = settings, validation, wording
        self.tools = tuple(bound.tool for bound in tools)
        self._tools = {bound.tool.name: (bound, ArgumentSchema(bound.tool)) for bound in tools}
        self._workers: background.Workers | None = None

    def call(self, episode: Any, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Answer a call; a Future if the tool waits. EnvironmentFault if it failed."""
        found = self._tools.get(name)
        if found is None:
            known = ", ".join(self._tools)
            return self._error(
                "unknown_tool", "", f"there is no tool {one_line(name, MAX_REASON_CHARACTERS)}; there are: {known}"
            )
        bound, schema = found
        is_valid = schema.is_valid(arguments)
        if not is_valid and self.validation == "reject":
            return self._error("invalid_arguments", name, schema.reasons(arguments))
        if bound.kind != "memory":
            return background.run(self._wait(bound, episode, arguments, is_valid))
        try:
            with watched(name):
                value = bound.handler(episode, arguments)
        except (Exception, SystemExit) as error:
            return self._after_error(bound, error)
        return self._reply(bound, value, is_valid)

    def malformed_call(self) -> ToolReply:
        return self._error("invalid_arguments", "", SHAPE)

    async def _wait(self, bound: BoundTool, episode: Any, arguments: Mapping[str, Any], is_valid: bool) -> ToolReply:
        seconds = self.settings.timeout_seconds
        try:
            if bound.kind == "async":
                async with asyncio.timeout(None if bound.own_clock else seconds):
                    value = await bound.handler(episode, arguments)
            else:
                self._workers = self._workers or background.Workers(self.settings.max_workers)
                value = await self._workers.run(lambda: bound.handler(episode, arguments), timeout_seconds=seconds)
        except TimeoutError:
            raise EnvironmentFault(f"no answer in {seconds:g} s", tool=bound.tool.name, type="timeout") from None
        except background.AllWorkersLost:
            message = f"each worker waits for a call that never returned (max_workers: {self.settings.max_workers})"
            raise EnvironmentFault(message, tool=bound.tool.name) from None
        except (Exception, SystemExit) as error:
            return self._after_error(bound, error)
        return self._reply(bound, value, is_valid)

    def _after_error(self, bound: BoundTool, error: BaseException) -> ToolReply:
        """The envelope for a wrong call; EnvironmentFault for everything else."""
        if isinstance(error, EnvironmentFault):
            raise error
        if not isinstance(error, ToolError):
            message = f"it crashed with {type(error).__name__}: {one_line(error, MAX_REASON_CHARACTERS)}"
            fault = EnvironmentFault(message, tool=bound.tool.name)
            fault.may_pass = _may_pass(error, bound.kind)
            raise fault from error
        if error.scripted or error.type not in OURS:
            return self._error(error.type, bound.tool.name, error.message)
        raise EnvironmentFault(error.message, tool=bound.tool.name, type=error.type) from None

    def _error(self, type: ErrorType, tool: str, message: str) -> ToolReply:
        return ToolReply(self._bound_text(self.wording(type, tool, message)), valid=type in OURS, error=type)

    def _reply(self, bound: BoundTool, value: Any, is_valid: bool) -> ToolReply:
        said = value.text if isinstance(value, ToolReply) else value
        try:
            text = self._bound_text(said if isinstance(said, str) else _REPLY.encode(said))
        except (TypeError, ValueError, RecursionError) as error:
            message = (
                f"it returned a {type(said).__name__}, which is neither text nor JSON "
                f"({one_line(error, MAX_REASON_CHARACTERS)}): return text, or a dict of texts, numbers and lists"
            )
            fault = EnvironmentFault(message, tool=bound.tool.name)
            fault.may_pass = False
            raise fault from TypeError(message)
        return replace(value, text=text) if isinstance(value, ToolReply) else ToolReply(text, is_valid)

    def _bound_text(self, text: str) -> str:
        """Cut to the limit, and without characters that UTF-8 cannot encode."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        limit = self.settings.max_reply_characters
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n[cut here: {len(text) - limit:,} more characters]"


def _may_pass(error: BaseException, kind: Kind) -> bool:
    """Whether the same call may succeed a little later, as after a lost connection. A tool in memory has none; in one
    that waits, an exception of another library's may mean that (those of aiohttp are no OSError).
    """
    if kind == "memory":
        return any(map(may_pass, members(error)))
    return any(may_pass(item) or _is_of_a_library(item) for item in members(error))


def _is_of_a_library(error: BaseException) -> bool:
    return type(error).__module__ != "builtins" and not is_of_a_file(error)


def _as_json(value: Any) -> Any:
    """What a tool returned, or has in what it returned, and JSON has no form of. TypeError where nobody can say one."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


_REPLY = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_as_json)
