"""What a model reads of an MCP result, whoever sends it: also of blocks that are not what the protocol has."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.tools.mcp_content import content_text

TEXT, IMAGE = {"type": "text", "text": "a\nb"}, {"type": "image", "data": "iVBORw=="}  # 4 bytes


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([TEXT, IMAGE], {"n": "é"}, "a\nb\n[image, 4 bytes]"),
        ([IMAGE], {"n": "é"}, '{"n": "é"}\n[image, 4 bytes]'),
        ([], None, ""),
        ([], [], "[]"),
        ([{"type": "resource_link", "uri": "repo://a b\nc"}], None, "[link to repo://a b c]"),
        ([{"type": "resource", "resource": {"uri": "repo://a", "text": "x\ny"}}], None, "[resource repo://a]\nx\ny"),
        ([{"type": "resource", "resource": {"uri": "r://a", "blob": "iVBORw=="}}], None, "[resource r://a, 4 bytes]"),
        ([{"type": "resource"}, {}, {"type": "image", "data": 5}], None, "[resource]\n[block]\n[image]"),
    ],
)
def test_texts_are_read_and_the_rest_is_noted(content: list[dict[str, Any]], structured: Any, text: str):
    assert content_text(content, structured) == text
