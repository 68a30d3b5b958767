"""What this process may use of its machine: memory and processors, by a container's limits where they are less."""

from __future__ import annotations

import math
import os
from pathlib import Path

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Bytes this process may still take: the machine's, or a container's limit where that is less."""
    import psutil

    available = float(psutil.virtual_memory().available)
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    return available if limit is None or used is None else max(0.0, min(available, limit - used))


def total_memory() -> float:
    """Bytes of the machine, or a container's limit where that is less."""
    import psutil

    total, limit = float(psutil.virtual_memory().total), _number(CGROUP / "memory.max")
    return total if limit is None else min(total, limit)


def num_processors() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _words(CGROUP / "cpu.max")
    if len(share) == 2 and share[0].isdigit():
        processors = min(processors, math.ceil(int(share[0]) / int(share[1])))
    return processors


def _number(file: Path) -> float | None:
    words = _words(file)
    return float(words[0]) if words and words[0].isdigit() else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
