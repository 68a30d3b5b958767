"""Which files this process opens for reading, through an audit hook: safetensors' own mapping of a file is not seen."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_counts: list[Counter[str]] = []


@contextmanager
def counting_reads(suffix: str) -> Iterator[Counter[str]]:
    """How often each file with this suffix was opened for reading inside, by its path then."""
    _add_hook()
    found: Counter[str] = Counter()
    _counts.append(found)
    try:
        yield found
    finally:
        _counts.remove(found)
        for path in [path for path in found if not path.endswith(suffix)]:
            del found[path]


@cache
def _add_hook() -> None:
    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not _counts or not isinstance(arguments[0], (str, os.PathLike)):
            return
        if not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            for counts in _counts:
                counts[os.path.abspath(os.fspath(arguments[0]))] += 1

    sys.addaudithook(note)
