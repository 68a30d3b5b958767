"""How this process computes: thread count, memory allocator, determinism. Called once by whoever runs a model.

glibc gives each large tensor fresh pages and returns them at once; on CPU the page faults cost more than the arithmetic
(a training step of the demo's model measured 1.2 s instead of 0.1 s), so large blocks are kept for reuse.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def prepare_torch(num_threads: int) -> None:
    """Fix what floats depend on. The thread count is a param, never taken from the machine."""
    import torch

    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 2% of a training step
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
