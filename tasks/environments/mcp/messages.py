"""Translates MCP: a server's tools to Tools, its results to the text a model reads, its errors to error types.

A result with `isError` is the server's message to the model, never an environment fault: `invalid_arguments` if the
server says so, else `conflict`, since MCP has no error types. So is a JSON-RPC error that is about the call, which is
how many servers refuse one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.core import json_text
from tasks.core.json_diff import changes
from tasks.core.secrets import Secrets
from tasks.core.text import printable
from tasks.tools.authoring import describe_tool
from tasks.tools.base import ErrorType, Tool
from tasks.tools.mcp_content import content_text

if TYPE_CHECKING:
    from mcp import types

Read = Callable[["types.CallToolResult"], str]  # what is read of a result
# How the SDKs for Python (1 and 2) and TypeScript begin such messages.
ARGUMENTS_REFUSED = re.compile(r"input validation error|invalid arguments|\bvalidation errors? for \w+", re.IGNORECASE)
UNKNOWN_TOOL = re.compile(r"unknown tool|tool \S+ not found", re.IGNORECASE)
MAX_TOOLS = 1000
INVALID_PARAMS = -32602
# JSON-RPC errors that are not about the call (infra/decisions/0097): the request was none, the connection ended, or the
# client lacks what the server needs. By number, since the SDK takes long to import.
NOT_OF_THE_CALL = {
    -32700, -32600, -32601,  # no JSON, no request, no such method
    -32000, -32001, -32800,  # connection closed, timed out, cancelled
    -32002,  # not initialized; before 2026 also a resource that was not found
    -32020, -32021, -32022, -32042,  # wrong headers, missing capability, other version, a person must log in
}  # fmt: skip
HTTP_OF_THE_CALL = (0, 400, 422)  # no error, or one that blames the request
SDK_GOT_NO_ANSWER = "Server returned an error response"  # the SDK's words where an HTTP error has no JSON-RPC body


class BadListing(ValueError):
    """A server's description is unusable; the message continues "the server …"."""


@dataclass(frozen=True)
class Listing:
    server: str
    version: str
    tools: dict[str, Tool]

    def difference(self, later: Listing, names: Iterable[str]) -> str:
        """The first change in the server or the named tools; empty if there is none."""
        return next(changes(self._described(names), later._described(names)), "")

    def nearest(self, name: str) -> str:
        """Tools with similar names, or all, for a message."""
        close = difflib.get_close_matches(name, list(self.tools), n=3, cutoff=0.5)
        if close:
            return f"Did you mean {printable(' or '.join(close))}?"
        return f"It has: {printable(', '.join(self.tools))}."

    def _described(self, names: Iterable[str]) -> dict[str, Any]:
        tools = {name: describe_tool(self.tools[name]) for name in names if name in self.tools}
        return {"server": {"name": self.server, "version": self.version}, "tools": tools}


def read_listing(info: types.Implementation | None, tools: Iterable[types.Tool], secrets: Secrets) -> Listing:
    """BadListing if two tools share a name, there are too many tools, or a schema is too deep."""
    name, version = (secrets.hide(info.name), secrets.hide(info.version)) if info else ("", "")
    listing = Listing(name, version, {})
    for item in tools:
        if item.name in listing.tools:
            raise BadListing(f"lists two tools called {item.name!r}")
        if len(listing.tools) == MAX_TOOLS:
            raise BadListing(f"lists more than {MAX_TOOLS:,} tools")
        for schema in (item.input_schema, item.output_schema):
            try:
                json_text.check_depth(schema)
            except ValueError as error:
                raise BadListing(f"lists a tool {item.name!r} whose schema is {error}") from None
        listing.tools[item.name] = _tool(item, version, secrets)
    return listing


def _tool(item: types.Tool, version: str, secrets: Secrets) -> Tool:
    hints = item.annotations
    return Tool(
        name=item.name,
        description=secrets.hide((item.description or "").strip()),
        parameters=secrets.hide_in(item.input_schema),
        read_only=bool(hints and hints.read_only_hint),
        idempotent=bool(hints and hints.idempotent_hint),
        version=version,
        output_schema=secrets.hide_in(item.output_schema),
    )


def result_text(result: types.CallToolResult) -> str:
    return content_text([block.model_dump() for block in result.content], result.structured_content)


def checker_text(result: types.CallToolResult) -> str:
    """The same for a checker, but a list is one JSON array: of it the SDK for Python sends a text block per element, no
    JSON together, and beside them `{"result": [...]}`. A tool's own object of that shape stays the object.
    """
    structured = result.structured_content
    listed = structured.get("result") if structured is not None and len(structured) == 1 else None
    if not isinstance(listed, list) or _is_said(structured, result):
        return result_text(result)
    return json_text.json_line(listed)


def _is_said(structured: Any, result: types.CallToolResult) -> bool:
    """Whether the one text block is the structured content."""
    said = [block.text for block in result.content if block.type == "text"]
    with suppress(ValueError):
        return len(said) == 1 and bool(json_text.parse(said[0]) == structured)
    return False


def is_of_the_call(code: int, message: str, http_status: int) -> bool:
    """Whether a JSON-RPC error is what the server says about this call, and not a failure of server or connection."""
    return http_status in HTTP_OF_THE_CALL and code not in NOT_OF_THE_CALL and message != SDK_GOT_NO_ANSWER


def error_type(text: str) -> ErrorType:
    return "invalid_arguments" if ARGUMENTS_REFUSED.search(text) else "conflict"
