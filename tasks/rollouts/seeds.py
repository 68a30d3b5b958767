"""Random streams: each turn of each episode has its own, derived from what it is and never from when it runs.

The key is (run seed, stage, draw number, problem id, sample index, turn). Batch size, concurrency and arrival order
therefore change no episode's stream, and snapshots evaluated with the same draw number share random numbers.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def stream_seed(*key: str | int) -> int:
    """A 64-bit seed from a key; equal keys give equal seeds on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest(), "big")


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` float64 numbers in [0, 1): one for each token a turn may sample."""
    return np.random.Generator(np.random.PCG64(seed)).random(count)
