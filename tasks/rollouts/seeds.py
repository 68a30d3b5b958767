"""Random streams: each turn of each episode has its own, derived from its identity and never from when it runs.

The key is (run seed, stage, draw number, problem id, sample index, turn), of which `core/seeds.py` makes a seed. So
batch size, concurrency and arrival order change no stream, and snapshots evaluated with the same draw number share
random numbers.
"""

from __future__ import annotations

import numpy as np


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` float64 numbers in [0, 1): one per token a turn may sample."""
    return np.random.Generator(np.random.PCG64(seed)).random(count)
