"""How this process computes: thread count, memory allocator, determinism. Called once by each program that runs a
model.

glibc returns large blocks at once, and on CPU the page faults cost more than the arithmetic (a training step of the
demo's model took 1.2 s instead of 0.1 s), so large blocks are kept for reuse.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

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


def use_threads(num_threads: int) -> None:
    """For this thread alone: torch's setting also sets MKL's for the whole process, unless a thread has its own."""
    import torch

    torch.get_num_threads()  # else a thread's first operation adopts the number last set anywhere
    torch.set_num_threads(num_threads)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    own = getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None) if library.exists() else None
    if own is not None:
        own(num_threads)
