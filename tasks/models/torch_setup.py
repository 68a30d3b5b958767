"""How this process computes: thread count, memory allocator, determinism; and what it need not import. Called once by
each program that runs a model.

glibc returns large blocks at once, and on CPU the page faults cost more than the arithmetic (a training step of the
demo's model took 1.2 s instead of 0.1 s), so large blocks are kept for reuse. Many are never used again: glibc 2.36
keeps the few bytes beside an aligned block for small ones, and the gap is then too small for the next block of that
size. Training 0.5B with LoRA took 24 GB so. A thread therefore gives free pages back whenever the process has grown by
`HEAP_GROWTH`.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.text import one_line
from tasks.models.settings import ComputeSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
OLD_DRIVER = "too old"  # in torch's words of a driver that knows no CUDA as new as its own
HEAP_GROWTH = 512 << 20  # bytes; page faults cost 0.5 s per GiB (2 cores of an AMD EPYC)
WATCH_SECONDS = 0.05  # in which a core can touch 100 MB
_PREPARED_FOR: list[ComputeSettings] = []  # none, or the last


def find_device(compute: ComputeSettings) -> torch.device:
    """ValueError where the device is not there, or has no units for a dtype of `compute`."""
    import torch

    there = compute.device != "cpu" and torch.cuda.is_available()
    if compute.device != "cpu" and not there:
        fault = _fault_of_cuda()
        if OLD_DRIVER in fault:  # a GPU that is left idle without a word would be found hours later
            raise ValueError(
                f"compute.device is {compute.device}, and torch cannot use the GPU that is here: {fault} Update "
                f"NVIDIA's driver (torch is built for CUDA {torch.version.cuda}), or set compute.device: cpu."
            )
        if compute.device == "cuda":
            raise ValueError(
                f"compute.device is cuda, and torch finds no CUDA device ({fault}), so nothing could be loaded. Set "
                f"compute.device: cpu or auto, or start on a machine with a GPU and a CUDA build of torch."
            )
    if there:
        _refuse_missing_dtype(compute)
    return torch.device("cuda" if there else "cpu")


@cache
def _fault_of_cuda() -> str:
    """Why torch finds no GPU, in its own words."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # the first from a build without CUDA
        return one_line(error)
    return "no reason is known"


def num_gpus(compute: ComputeSettings) -> int:
    """That this process may compute with."""
    import torch

    return torch.cuda.device_count() if find_device(compute).type == "cuda" else 0


def _refuse_missing_dtype(compute: ComputeSettings) -> None:
    """Cards before Ampere emulate bfloat16, many times slower than float32."""
    import torch

    asked = [name for name in ("weights", "frozen") if getattr(compute, name) == "bfloat16"]
    if asked and not torch.cuda.is_bf16_supported(including_emulation=False):
        keys = " and ".join(f"compute.{name}" for name in asked)
        raise ValueError(
            f"{keys}: bfloat16, which {torch.cuda.get_device_name()} cannot compute with, so nothing was loaded. Set "
            f"{keys} to float32, or use a card of compute capability 8.0 or higher."
        )


def device_name(compute: ComputeSettings) -> str:
    """What a record says of the device: the name of the GPU, or the processor's architecture."""
    if compute.device == "cpu" or find_device(compute).type == "cpu":  # for a CPU without importing torch
        return f"cpu, {platform.machine()}"
    import torch

    return str(torch.cuda.get_device_name())


def prepare_torch(compute: ComputeSettings) -> torch.device:
    """Fix what floats depend on, and return the device. The thread count is a param, never taken from the machine.

    Equal seeds give equal bits on a CPU. On CUDA they give the same draws, not the same bits: sums there have no order.
    """
    import torch

    device = find_device(compute)
    _PREPARED_FOR[:] = [compute]
    torch.set_num_threads(compute.num_threads)
    torch.use_deterministic_algorithms(mode=device.type == "cpu", warn_only=True)
    leave_out_sklearn()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if compute.tf32 else "highest")
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 2% of a training step
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        _keep_heap_small()
    return device


def prepared_for() -> ComputeSettings | None:
    """What the process was last prepared for; None before. Whoever comes later must not change it for the others."""
    return _PREPARED_FOR[0] if _PREPARED_FOR else None


@cache
def leave_out_sklearn() -> None:
    """Call before the first model or tokenizer: transformers imports it with that, where it is installed, for assisted
    generation, which nothing here uses. 0.9 s of the 4.6 s that imports take (2 cores of an AMD EPYC). Other parts of
    transformers, imported later, find it.
    """
    import transformers.utils

    real = transformers.utils.is_sklearn_available
    transformers.utils.is_sklearn_available = lambda: False
    try:
        import transformers.generation.candidate_generator
    finally:
        transformers.utils.is_sklearn_available = real


@cache
def _keep_heap_small() -> None:
    """Keep large blocks for reuse, and start the thread that gives back what nobody reuses; once in a process."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    threading.Thread(target=_watch_heap, args=(libc,), name="heap", daemon=True).start()


def _watch_heap(libc: ctypes.CDLL) -> None:
    """A trim keeps every block in use, so only time depends on when it happens."""
    least = resident_bytes()
    while True:
        time.sleep(WATCH_SECONDS)
        least = min(least, resident_bytes())
        if resident_bytes() > least + HEAP_GROWTH:
            libc.malloc_trim(0)
            least = resident_bytes()


def resident_bytes() -> int:
    """Of this process in memory, by Linux's proc(5)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def product_dtype(device: torch.device) -> str:
    """The dtype as exact as float32 products are: with TensorFloat-32 their factors have 10 bits, as float16's have."""
    import torch

    is_rounded = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "float16" if is_rounded else "float32"


def is_small(model: PreTrainedModel, most: int) -> bool:
    """Whether its weights have at most so many bytes, on a CPU: products that several threads share badly."""
    size = sum(item.numel() * item.element_size() for item in model.parameters())
    return bool(model.device.type == "cpu" and size <= most)


def free_unused(device: torch.device) -> None:
    """Give what torch keeps for reuse back to the GPU, where another process can take it; nothing on a CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def start_threads(count: int, torch_threads: int, *, name: str) -> list[ThreadPoolExecutor]:
    """One executor of one thread each, torch using `torch_threads` in it. The default of later threads, which that
    changes, is restored.
    """
    import torch

    before = torch.get_num_threads()
    threads = [ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(count)]
    for thread in threads:
        thread.submit(use_threads, torch_threads).result()
    torch.set_num_threads(before)
    return threads


def use_threads(num_threads: int) -> None:
    """For this thread alone: torch's setting also sets MKL's for the whole process, unless a thread has its own."""
    import torch

    torch.get_num_threads()  # else a thread's first operation adopts the number last set anywhere
    torch.set_num_threads(num_threads)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    own = getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None) if library.exists() else None
    if own is not None:
        own(num_threads)
