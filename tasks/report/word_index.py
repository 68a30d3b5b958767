"""Full-text search of the browser page: for every word, the episodes it is in, in files by the first character.

Scripts with few characters have a file for each, the others one per block of 256. A word is a run of letters, digits
and `_`; it is found by its beginning, and by that of each part after a `_`. Scripts without spaces are found by
character. page/search.js splits a query in the same way. What no screen shows is a word's end, as the page writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from tasks.core.pages import page_text
from tasks.report.script_files import ScriptFolder, script_json

UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\u0e00-\u0eff"  # Han, kana, hangul; Thai and Lao
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
MAX_WORD_CHARACTERS = 40
END_OF_ALPHABETS = 0x1000  # below it are the alphabets of Europe, the Near East and India, Thai and Lao


class WordIndex:
    """Words of numbered texts; the numbers must rise."""

    def __init__(self) -> None:
        self._episodes: dict[str, list[int]] = {}
        self._beginnings: dict[str, tuple[str, ...]] = {}  # of each word met so far: episodes share most of theirs

    def add(self, number: int, texts: Iterable[str]) -> None:
        words: set[str] = set()
        for text in texts:
            words.update(WORD.findall(page_text(text).lower()))
        known = self._beginnings
        known.update((word, _beginnings(word)) for word in words.difference(known))
        for beginning in set(chain.from_iterable(map(known.__getitem__, words))):
            self._episodes.setdefault(beginning, []).append(number)

    def write(self, scripts: ScriptFolder) -> list[str]:
        """One file `words-<key>.js` for each first character; returns the keys. Episodes are stored as differences,
        which are short.
        """
        files: dict[str, tuple[list[str], list[list[int]]]] = {}
        for word in sorted(self._episodes):
            words, episodes = files.setdefault(_key(word), ([], []))
            numbers = self._episodes[word]
            words.append(word)
            episodes.append([after - before for before, after in zip([0, *numbers], numbers, strict=False)])
        for key, (words, episodes) in files.items():
            scripts.write(f"words-{key}", script_json({"words": words, "episodes": episodes}))
        return sorted(files)


def _beginnings(word: str) -> tuple[str, ...]:
    """`get_flight_cost` → itself, `flight_cost` and `cost`."""
    if "_" not in word:
        return (word[:MAX_WORD_CHARACTERS],)
    places = [0, *(found.end() for found in re.finditer("_+", word) if found.end() < len(word))]
    return tuple(word[place : place + MAX_WORD_CHARACTERS] for place in places)


def _key(word: str) -> str:
    """`cost` → `c`, `łódź` → `u0142`, `東` (U+6771) → `u6700`."""
    if word[0].isascii() and word[0].isalnum():
        return word[0]
    code = ord(word[0])
    return f"u{code if code < END_OF_ALPHABETS else code & ~0xFF:04x}"
