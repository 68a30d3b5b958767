"""What the README shows, as tests run it: its fenced blocks, found by the language and a word in them."""

from __future__ import annotations

import re

from tests.conftest import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def readme_block(language: str, containing: str) -> str:
    """The one fenced block of a language that contains a text."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (found,) = [code for name, code in blocks if name == language and containing in code]
    return str(found)
