"""What a measurement ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor as it names itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
