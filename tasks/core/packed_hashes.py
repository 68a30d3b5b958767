"""Sets of short hashes as one base64 text for JSON, sorted, so that equal sets give equal texts."""

from __future__ import annotations

import base64
from collections.abc import Iterable


def pack_hashes(hashes: Iterable[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(hashes))).decode()


def unpack_hashes(text: str, size: int) -> frozenset[bytes]:
    """The hashes of `size` bytes each; ValueError if the text is damaged."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) % size:
        raise ValueError("cut off")
    return frozenset(packed[start : start + size] for start in range(0, len(packed), size))
