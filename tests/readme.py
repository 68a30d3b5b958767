"""What the pages show, as tests run it: a page's fenced blocks, found by the language and a word in them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page_block(page: Path | str, language: str, containing: str = "") -> str:
    """The one fenced block of a language that contains a text."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    (found,) = [code for name, code in blocks if name == language and containing in code]
    return str(found)
