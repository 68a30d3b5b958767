"""Machines a run may be planned for: memory, arithmetic, bandwidth and price.

**Figures of GPUs are the maker's published peaks** (dense, without sparsity), never measured here. On 2026-11-22 those
of H200, H100, A100 and L40S were compared with public tables; the 4090's are from memory. **Prices are assumed**, near
one cloud's cheapest hours in March 2026 (H200 3.59, H100 2.69, A100 1.39, L40S 0.79, 4090 0.34), and have an option.
The CPU's figures are measured when asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from tasks.core.machine import GIB, available_memory, num_processors
from tasks.models.settings import ComputeSettings

CPU_BANDWIDTH, CPU_DOLLARS = 20e9, 0.1  # of two cores; assumptions
MEASURE_SECONDS = 0.15
LARGEST_MATRIX = 1024
USABLE_SHARE = 0.98  # of the gigabytes a card is sold with


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes, operations per second by dtype, bytes per second of the device's memory, dollars per hour.

    A card of an unknown kind has its memory and no rates, so no time can be told for it.
    """

    name: str
    is_gpu: bool
    memory: float
    rate: Mapping[str, float]
    bandwidth: float
    dollars_per_hour: float


def _gpu(
    name: str, gib: float, bfloat16: float, tf32: float, float32: float, bandwidth: float, dollars: float
) -> Machine:
    """TFLOP/s of bfloat16, TF32 and float32; GB/s."""
    rate = {"bfloat16": 1e12 * bfloat16, "tf32": 1e12 * tf32, "float32": 1e12 * float32}
    return Machine(name, True, GIB * gib, rate, 1e9 * bandwidth, dollars)


GPUS = {
    machine.name: machine
    for machine in (
        _gpu("h200-141gb", 140, 989, 494, 67, 4800, 3.5),
        _gpu("h100-80gb", 79, 989, 494, 67, 3350, 2.5),
        _gpu("a100-80gb", 79, 312, 156, 19.5, 2039, 1.7),
        _gpu("a100-40gb", 39.4, 312, 156, 19.5, 1555, 1.2),
        _gpu("l40s-48gb", 44.5, 362, 183, 91.6, 864, 0.9),
        _gpu("4090-24gb", 23.5, 165, 82.6, 82.6, 1008, 0.4),
    )
}
# Words of torch's names of these cards; the memory of the card says which of two. A GH200 is not an H200.
NAMES = {"H200": "h200", "H100": "h100", "A100": "a100", "L40S": "l40s", "4090": "4090"}


def find_gpu(name: str) -> Machine:
    """A known card, or one of a size such as `24gb`, whose speed is not known. ValueError with the known names."""
    wanted = name.strip().lower()
    if wanted in GPUS:
        return GPUS[wanted]
    if size := re.fullmatch(r"([1-9]\d{0,3})\s?gi?b", wanted):
        return Machine(f"a card sold as {size[1]} GB,", True, USABLE_SHARE * GIB * int(size[1]), {}, 0.0, 0.0)
    raise ValueError(
        f"--gpu {name!r} is not a machine whose figures are known, so nothing can be planned for it."
        f"{_nearest_name(wanted)} Choose one of: {', '.join(GPUS)}, cpu; or a size such as 24gb, for memory alone."
    )


def _nearest_name(wanted: str) -> str:
    near = [name for name in GPUS if wanted and name.startswith(wanted)] or get_close_matches(wanted, GPUS, 1)
    return f" Did you mean {near[0]}?" if near else ""


def this_machine(compute: ComputeSettings) -> Machine:
    """What `compute.device` means here: the card torch finds, or the processor, whose rates `measured` measures."""
    found = None if compute.device == "cpu" else _this_gpu()
    return found or Machine("cpu", False, available_memory(), {}, CPU_BANDWIDTH, CPU_DOLLARS)


def _this_gpu() -> Machine | None:
    import torch

    if not torch.cuda.is_available():
        return None
    memory, name = float(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    return named_gpu(name, memory)


def named_gpu(name: str, memory: float) -> Machine:
    """The card that torch calls `name`, with the memory it says it has."""
    words = re.split(r"[\s-]+", name)
    kind = next((kind for word, kind in NAMES.items() if word in words and "Laptop" not in words), None)
    alike = [machine for machine in GPUS.values() if kind and machine.name.startswith(kind)]
    if not alike:
        return Machine(name, True, memory, {}, 0.0, 0.0)
    nearest = min(alike, key=lambda machine: abs(machine.memory - memory))
    return replace(nearest, name=name, memory=memory)


def measured(machine: Machine, *, hidden: int, inner: int, num_threads: int) -> Machine:
    """A processor with the rate of its float32 products; those of bfloat16 took three times as long on one without
    instructions of their own.
    """
    if machine.is_gpu:
        return machine
    rate = matrix_rate(hidden=hidden, inner=inner, num_threads=num_threads)
    return replace(machine, rate={"float32": rate, "bfloat16": rate / 3})


def matrix_rate(*, hidden: int, inner: int, num_threads: int) -> float:
    """Operations per second of float32 products shaped like the model's.

    One thread's rate times `num_threads`: on a busy machine several threads would wait for each other.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    hidden, inner = min(LARGEST_MATRIX, hidden), min(LARGEST_MATRIX, inner)
    one, other = np.ones((256, hidden), dtype=np.float32), np.ones((hidden, inner), dtype=np.float32)
    best, until = 0.0, time.perf_counter() + MEASURE_SECONDS
    with threadpool_limits(1):
        while not best or time.perf_counter() < until:
            started = time.perf_counter()
            one @ other
            best = max(best, 2 * one.size * inner / (time.perf_counter() - started))
    return best * min(num_threads, num_processors())


def amount(num_bytes: float) -> str:
    """`3 MB`, `1.4 GB`."""
    for unit in ("KB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.1f} {unit}" if num_bytes < 9.95 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"
