"""Data that spells a format's own tags: it must neither end a call nor begin another."""

from __future__ import annotations

from typing import Any

from tasks.core.json_text import json_line


def escape_tags(body: str, *tags: str) -> str:
    """JSON in which each tag begins with a code: a tag in JSON is within a string, so the value stays the same."""
    for tag in tags:
        body = body.replace(tag, f"\\u{ord(tag[0]):04x}{tag[1:]}")
    return body


def bare_text(value: Any, *tags: str) -> str:
    """A text as it is, anything else as JSON. A text has no escapes, so there a space breaks each tag."""
    if not isinstance(value, str):
        return escape_tags(json_line(value), *tags)
    for tag in tags:
        value = value.replace(tag, f"{tag[0]} {tag[1:]}")
    return value
