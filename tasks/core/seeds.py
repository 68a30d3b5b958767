"""Random streams: each has its own seed, derived from what it is for and never from when it runs."""

from __future__ import annotations

import hashlib
import json


def stream_seed(*key: str | int) -> int:
    """A 64-bit seed; equal keys give equal seeds on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest(), "big")
