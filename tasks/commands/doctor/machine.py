"""Checks of the machine: whether it has the threads, memory, disk and time that a run would take (`estimates.py`)."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.estimates import (
    disk_needed,
    evaluate_seconds,
    memory_needed,
    num_snapshots,
    size,
    train_seconds,
    weights_bytes,
)
from tasks.commands.doctor.findings import Finding, failed, passed, warned
from tasks.core.progress import spell

TIGHT = 0.8  # from this share of what the machine has, an estimate is a warning
LONG_HOURS = 24
MEASURE_SECONDS = 0.15
LARGEST_MATRIX = 1024
EFFICIENCY = 0.4  # the share of the rate of plain matrix products that training reaches, measured on the demo
CGROUP = Path("/sys/fs/cgroup")


def threads(context: DoctorContext) -> Finding:
    wanted, there = context.settings.compute.num_threads, num_processors()
    if wanted > there:
        return warned(
            f"compute.num_threads is {wanted}, and this process may use {there} processor{'s' * (there != 1)}",
            f"More threads than processors slow each other down. Set compute.num_threads to {there} (results will "
            f"differ in the last digits).",
        )
    return passed(f"compute.num_threads is {wanted}, of {there} processors")


def memory(context: DoctorContext) -> Finding:
    needed, there = memory_needed(context), available_memory()
    told = f"training takes about {amount(needed)}, {amount(there)} are free"
    remedy = (
        "Lower engine.max_concurrent_episodes or train.micro_batch_tokens, set train.gradient_checkpointing or "
        "train.lora, or use a larger machine."
    )
    return _against(needed, there, told, remedy)


def disk(context: DoctorContext) -> Finding:
    needed, there = disk_needed(context), shutil.disk_usage(_existing(context.paths.artifacts)).free
    told = f"results take about {amount(needed)}, {amount(there)} are free"
    remedy = (
        f"There are {num_snapshots(context):,} snapshots of {amount(weights_bytes(context))}. Raise "
        f"train.snapshot_interval, free some space, or move paths.artifacts."
    )
    return _against(needed, there, told, remedy)


def duration(context: DoctorContext) -> Finding:
    rate = matrix_rate(context)
    train, evaluate = train_seconds(context, rate), evaluate_seconds(context, rate)
    told = f"a guess: train {spell(train)}, evaluate {spell(evaluate)} ({rate / 1e9:,.0f} GFLOP/s)"
    if train + evaluate > LONG_HOURS * 3600:
        return warned(told, "Lower train.num_iterations, use a smaller model, or plan for it; a killed run continues.")
    return passed(told)


def matrix_rate(context: DoctorContext) -> float:
    """Operations per second for training, from float32 products shaped like the model's.

    One thread's rate times `compute.num_threads`: on a busy machine several threads would wait for each other.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    hidden = min(LARGEST_MATRIX, size(context, "hidden_size"))
    inner = min(LARGEST_MATRIX, context.model.config.get("intermediate_size") or 4 * hidden)
    one, other = np.ones((256, hidden), dtype=np.float32), np.ones((hidden, inner), dtype=np.float32)
    best, until = 0.0, time.perf_counter() + MEASURE_SECONDS
    with threadpool_limits(1):
        while not best or time.perf_counter() < until:
            started = time.perf_counter()
            one @ other
            best = max(best, 2 * one.size * inner / (time.perf_counter() - started))
    return EFFICIENCY * best * min(context.settings.compute.num_threads, num_processors())


def available_memory() -> float:
    """Bytes this process may still take: the machine's, or a container's limit where that is less."""
    import psutil

    available = float(psutil.virtual_memory().available)
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    return available if limit is None or used is None else max(0.0, min(available, limit - used))


def num_processors() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _words(CGROUP / "cpu.max")
    if len(share) == 2 and share[0].isdigit():
        processors = min(processors, math.ceil(int(share[0]) / int(share[1])))
    return processors


def amount(num_bytes: float) -> str:
    """`3 MB`, `1.4 GB`."""
    for unit in ("KB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.1f} {unit}" if num_bytes < 9.95 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"


def _against(needed: float, there: float, told: str, remedy: str) -> Finding:
    if needed > there:
        return failed(told, remedy)
    return warned(told, remedy) if needed > TIGHT * there else passed(told)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _number(file: Path) -> float | None:
    words = _words(file)
    return float(words[0]) if words and words[0].isdigit() else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
