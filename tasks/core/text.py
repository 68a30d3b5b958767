"""Text of others (models, tools, servers, files), made fit to be shown."""

from __future__ import annotations

import re

HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """`text` with each half of a surrogate pair as U+FFFD: JSON from a tool may hold one, and UTF-8 has none for it."""
    return HALF_A_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)
