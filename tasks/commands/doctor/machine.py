"""Checks of the machine: whether it has the threads, memory, disk and time that a run would take (`estimates.py`)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.estimates import (
    agent_seconds_needed,
    disk_needed,
    num_snapshots,
    planned_setup,
    seconds_needed,
)
from tasks.commands.doctor.findings import Finding, failed, passed, warned
from tasks.core.machine import num_processors
from tasks.core.progress import span, spell
from tasks.models.native.compiled import COMPILERS, NOEXEC, fault_of, find_compilers
from tasks.models.torch_setup import num_gpus
from tasks.planning.hardware import amount
from tasks.planning.memory import loaded_bytes, plan_memory, share_fault, snapshot_bytes, warm_start_memory
from tasks.planning.nearest import (
    LOADED_REMEDY,
    TIGHT,
    arithmetic,
    describe_load,
    remedy,
    warm_start_remedy,
)
from tasks.rollouts.settings import MORE_ROOM

LONG_HOURS = 24
SLOWER = "A small model plays and trains several times slower on a CPU"
INSTALL = "Install gcc or clang"
NO_KERNELS = "FlexAttention and vLLM compile their kernels with it, so training would not begin"


def threads(context: DoctorContext) -> Finding:
    wanted, there = context.settings.compute.num_threads, num_processors()
    if wanted > there:
        return warned(
            f"compute.num_threads is {wanted}, and this process may use {there} processor{'s' * (there != 1)}",
            f"More threads than processors slow each other down. Set compute.num_threads to {there} (results will "
            f"differ in the last digits).",
        )
    return passed(f"compute.num_threads is {wanted}, of {there} processors")


def compiler(context: DoctorContext) -> Finding:
    found = find_compilers()
    compute = context.settings.compute
    if compute.device == "cuda" or (compute.device == "auto" and num_gpus(compute)):
        return _compiler_of_kernels(context, found)
    if not found:
        return warned(f"no C compiler is on the PATH ({', '.join(COMPILERS)})", f"{SLOWER} without one. {INSTALL}.")
    if fault := fault_of("decode_step"):
        way_out = "Mount it with exec" if NOEXEC in fault else f"{INSTALL}, with its headers"
        return warned(f"no C compiler succeeds ({fault})", f"{SLOWER} without it. {way_out}.")
    return passed("a C compiler makes what a small model needs on a CPU")


def _compiler_of_kernels(context: DoctorContext, found: list[str]) -> Finding:
    """Triton, by which FlexAttention and vLLM compile for a GPU, builds a module of Python in C."""
    settings, engine = context.settings, context.settings.engine.own
    is_vllm_here = engine.has_own_memory and not getattr(engine, "urls", None)
    if settings.train.packing == "none" and not is_vllm_here:
        return passed("none is needed on a GPU with train.packing: none")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not (found or os.environ.get("CC")):
        return failed(f"no C compiler is on the PATH ({', '.join(COMPILERS)})", f"{NO_KERNELS}. {INSTALL}.")
    if not header.is_file():
        return failed(f"{header} does not exist", f"{NO_KERNELS}. Install Python's headers (Debian: python3-dev).")
    return passed("a C compiler and Python's headers make what a GPU's kernels need")


def memory(context: DoctorContext) -> Finding:
    if fault := _crowd_fault(context.settings):
        return failed(fault, MORE_ROOM)
    setup = planned_setup(context)
    if fault := share_fault(setup):
        return failed(fault, remedy(setup))
    there = setup.machine.memory
    if setup.settings.launch.num_trainers > 1:
        loaded = loaded_bytes(setup)
        told = f"{describe_load(setup, loaded)}, {amount(there)} are free on {setup.machine.name}"
        return _against(loaded, there, f"{told}; what they take then is not planned", LOADED_REMEDY)
    needed = plan_memory(setup)
    told = f"a run takes about {amount(needed.peak)}, {amount(there)} are free on {setup.machine.name}"
    if needed.peak > TIGHT * there:
        told += f": {arithmetic(needed)}"
    warm_start = warm_start_memory(setup).peak if context.settings.assess.may_warm_start else 0.0
    if needed.peak < warm_start:
        told += f"; a warm start would train all weights: {amount(warm_start)}"
        if needed.peak <= there < warm_start:
            return failed(told, warm_start_remedy(setup))
    return _against(needed.peak, there, told, remedy(setup))


def _crowd_fault(settings: DoctorSections) -> str | None:
    """Ray has a whole cluster, and of ranks that others start nobody knows here how many share this machine."""
    launcher = settings.launch.launcher
    num_trainers = settings.launch.num_trainers if launcher == "torchrun" else 1
    if launcher == "ray" or not settings.engine.own.num_own_gpus:
        return None
    return settings.engine.own.crowd_fault(num_trainers=num_trainers, num_gpus=num_gpus(settings.compute))


def disk(context: DoctorContext) -> Finding:
    needed, there = disk_needed(context), shutil.disk_usage(_existing(context.paths.artifacts)).free
    told = f"results take about {amount(needed)}, {amount(there)} are free"
    told_remedy = (
        f"There are {num_snapshots(context.settings.train):,} snapshots of "
        f"{amount(snapshot_bytes(planned_setup(context)))}. Raise train.snapshot_interval, free some space, or move "
        f"paths.artifacts."
    )
    return _against(needed, there, told, told_remedy)


def duration(context: DoctorContext) -> Finding:
    seconds = seconds_needed(context)
    warm_start = (
        f"warm start {span(spell, seconds.warm_start, seconds.warm_start_most)}, " if seconds.warm_start else ""
    )
    told = f"a guess: {warm_start}train {spell(seconds.train)}, evaluate {spell(seconds.evaluate)}"
    told += ", with episodes as long as the references; `plan` takes played ones, else the whole budget"
    total = seconds.total_most
    if (own := context.agent_seconds) is not None:
        total += (agents := agent_seconds_needed(context, own))
        told += f", and of the agent itself {spell(agents)} or more, at {own:.2g} s per episode"
    elif context.settings.environment.name == "agent":
        told += ", without the agent's own time"
    if total > LONG_HOURS * 3600:
        return warned(told, "Lower train.num_iterations, use a smaller model, or plan for it; a killed run continues.")
    return passed(told)


def _against(needed: float, there: float, told: str, remedy: str) -> Finding:
    if needed > there:
        return failed(told, remedy)
    return warned(told, remedy) if needed > TIGHT * there else passed(told)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
