"""Identifies the process that owns something in MLflow or in a folder, and tells whether it is certainly gone.

Machines and containers share a server or a disk, and process id, host name and folder may be equal; boot and process
namespace differ. If these are unknown, the process counts as alive.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.surroundings import process_start

BOOT, MACHINE, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id"), Path("/proc/self/ns/pid")
OF_THE_HOST = "pid:[4026531836]"  # outside containers, a constant of Linux (PROC_PID_INIT_INO)


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "installation": _text(MACHINE),
        "boot": _text(BOOT),
        "namespace": os.readlink(NAMESPACE) if NAMESPACE.exists() else "",
        "pid": pid,
        "started": process_start(pid),
    }


def is_gone(process: Mapping[str, Any]) -> bool:
    """Whether a process, described by `this_process`, has certainly ended, here or by a reboot."""
    here = this_process()
    if any(process.get(name) != here[name] for name in ("host", "installation")):
        return False
    if process.get("boot") != here["boot"]:  # two containers of one image may differ only here
        return here["installation"] != "" and process.get("namespace") == here["namespace"] == OF_THE_HOST
    return process.get("namespace") == here["namespace"] and not _is_running(process["pid"], process["started"])


def is_noted_gone(note: str | None) -> bool:
    """The same of a process that is noted as JSON where anybody can edit it, such as in a tag."""
    try:
        return note is not None and is_gone(json.loads(note))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_running(pid: int, started: float) -> bool:
    """Also compares the start, since another process may have the id now."""
    import psutil

    try:
        return abs(process_start(pid) - started) < 2 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""
