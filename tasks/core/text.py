r"""Text of others (models, tools, servers, files), made fit to be shown or written.

It may contain an escape sequence that moves the cursor, a mark that turns the direction of writing, a novel. Messages
repeat it by `one_line`; every printed line passes `visible` (`terminal.py`), and every page `page_text` (`pages.py`).
"""

from __future__ import annotations

import json
import re

LIMIT = 300  # characters of foreign text that a message repeats
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def one_line(text: object, limit: int = LIMIT) -> str:
    r"""Foreign text on one line: single spaces, what a terminal would act on shown (`\x1b`), cut to `limit`."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= limit else f"{line[:limit]}…"


def printable(text: str) -> str:
    """The text with every character escaped that a terminal would act on instead of showing it; spaces stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def visible(text: str) -> str:
    """The same of a text whose line breaks and tabs are meant."""
    return (
        "".join(letter if letter in "\n\t" else _shown(letter) for letter in text) if not text.isprintable() else text
    )


def encodable(text: str) -> str:
    """`text` with each half of a surrogate pair as U+FFFD: JSON from a tool may hold one, and UTF-8 has none for it."""
    return HALF_A_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return json.dumps(letter)[1:-1] if ord(letter) > 127 else f"\\x{ord(letter):02x}"
