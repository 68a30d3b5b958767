"""The text that a model reads of an MCP result, which servers of mcp and of openenv send."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core import json_text
from tasks.core.text import one_line

MAX_URI_CHARACTERS = 2000
OF_HIDDEN_ERRORS = (
    "The SDK for Python hides the words of an exception that is not its ToolError, so a model cannot learn from it: "
    "raise ToolError in the server where the call is wrong."
)


def content_text(content: Sequence[Mapping[str, Any]], structured: Any) -> str:
    """The text blocks, the texts of embedded resources, and notes of the others such as `[image, 12345 bytes]`. Without
    a text block the structured content, as JSON, is first.
    """
    texts = [_block_text(block) for block in content]
    if structured is not None and all(block.get("type") != "text" for block in content):
        texts.insert(0, json_text.json_line(structured))
    return "\n".join(texts)


def hides_error(tool: str, reply: str) -> bool:
    """Whether a refusal says nothing but that there was one."""
    return re.search(rf"Error executing tool {re.escape(tool)}\W*$", reply) is not None


def _block_text(block: Mapping[str, Any]) -> str:
    """Of a resource its text under its URI: servers return a file's contents so, and the text block only says that it
    came.
    """
    kind, resource = block.get("type", "block"), block.get("resource")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource_link":
        return f"[link to {_uri(block)}]"
    if kind == "resource" and isinstance(resource, Mapping):
        what = f"resource {_uri(resource)}"
        return f"[{what}]\n{resource['text']}" if "text" in resource else _note(what, resource.get("blob"))
    return _note(one_line(kind, 40), block.get("data"))


def _uri(holder: Mapping[str, Any]) -> str:
    return one_line(holder.get("uri", ""), MAX_URI_CHARACTERS)


def _note(what: str, base64: Any) -> str:
    """With the size of its data, decoded."""
    if not isinstance(base64, str):
        return f"[{what}]"
    return f"[{what}, {len(base64) * 3 // 4 - base64[-2:].count('=')} bytes]"
