"""Starts a module as several ranks on this machine, which meet over gloo on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.pipeline.prefect_api import free_port

ROOT = Path(__file__).resolve().parent.parent


def start_ranks(module: str, *arguments: str, size: int) -> list[subprocess.Popen[str]]:
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def run_ranks(module: str, *arguments: str, size: int, timeout: float = 600) -> None:
    """AssertionError with what they said where one fails."""
    processes = start_ranks(module, *arguments, size=size)
    said = [process.communicate(timeout=timeout)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
