"""What disks, kills and editors do to a file, for every test of a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PAGE = 4096


def _zero_a_page(data: bytes) -> bytes:
    """In the middle, or all but the ends of a file that is smaller than a page."""
    size = min(PAGE, max(1, len(data) - 8))
    start = (len(data) - size) // 2
    return data[:start] + bytes(size) + data[start + size :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "a page of zeros": _zero_a_page,
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)) * (1 + len(data) // 256),
}
OF_JSON: dict[str, Callable[[bytes], bytes]] = {
    **DAMAGES,
    "another shape": lambda data: b'{"a": [1, 2]}\n',
    "no object": lambda data: b"[1, 2]\n",
}


def damage(file: Path, kind: str) -> None:
    file.write_bytes(OF_JSON[kind](file.read_bytes()))
