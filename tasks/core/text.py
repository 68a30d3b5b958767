r"""Foreign text (of models, tools, servers, files) made safe to show or write.

It may contain escape sequences, marks that reverse the direction of writing, or a novel. Messages shorten it with
`one_line`; printed lines pass `visible` (`terminal.py`), pages `page_text` (`pages.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from unicodedata import category

LIMIT = 300  # characters of foreign text in a message
INVISIBLE, BLANK_LETTERS = ("Cc", "Cf", "Cs"), "\u115f\u1160\u2800\u3164\uffa0"
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def one_line(text: object, limit: int = LIMIT) -> str:
    r"""On one line: single spaces, control characters shown (`\x1b`), cut to `limit` characters."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def first_few(items: Sequence[str], most: int = 3, *, by: str = ", ") -> str:
    """The first of the items, and how many more there are: `a, b, c and 4 more`."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return by.join(items[:most]) + more


def counted(number: float, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 snapshot`, `1,200 snapshots`; `plural` where that is more than an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    """Escape every character that a terminal would act on; spaces stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def visible(text: str) -> str:
    """The same, keeping line breaks and tabs."""
    return (
        "".join(letter if letter in "\n\t" else _shown(letter) for letter in text) if not text.isprintable() else text
    )


def is_blank(text: str) -> bool:
    """Whether a reader sees nothing in it: spaces and invisible characters (U+200B) at most. What this Python's Unicode
    does not know, such as a new emoji, is seen.
    """
    return all(letter.isspace() or letter in BLANK_LETTERS or category(letter) in INVISIBLE for letter in text)


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair, which UTF-8 cannot encode, by U+FFFD."""
    return HALF_A_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return json.dumps(letter)[1:-1] if ord(letter) > 127 else f"\\x{ord(letter):02x}"


SHOWN = 40  # characters of a difference


def show_difference(one: str, other: str) -> str:
    """The first place where two texts differ, with 40 characters of each from there, as one line."""
    pairs = zip(one, other, strict=False)
    place = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
    before, left, right = (
        one[max(0, place - SHOWN // 2) : place],
        one[place : place + SHOWN],
        other[place : place + SHOWN],
    )
    return f"After {before!r} it writes {left!r} in one place and {right!r} in the other"
