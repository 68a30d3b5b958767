"""Random streams: each has its own seed, derived from what it is for and never from when it runs."""

from __future__ import annotations

import hashlib
import json


def stream_seed(*key: str | int) -> int:
    """A 64-bit seed; equal keys give equal seeds on every machine and Python."""
    return SeedStream(*key).seed()


class SeedStream:
    """The seeds of all keys that begin alike: `SeedStream(1, "a").seed(2)` is `stream_seed(1, "a", 2)`."""

    def __init__(self, *start: str | int):
        self._begun = hashlib.blake2b(json.dumps(start).removesuffix("]").encode(), digest_size=8)

    def seed(self, *numbers: int) -> int:
        digest = self._begun.copy()
        digest.update("".join([*(f", {number}" for number in numbers), "]"]).encode())
        return int.from_bytes(digest.digest(), "big")
