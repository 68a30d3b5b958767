"""Ranks on this machine, which meet over gloo on loopback and stay for one call after another.

To start a process and load torch takes longer than most cases compute, so one pair serves a whole test session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.prefect_api import free_port

ROOT = Path(__file__).resolve().parent.parent
DONE = "this rank has done its call"


class RankProcesses:
    def __init__(self, size: int, *, step_seconds: float = 60.0):
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.rank_process", str(step_seconds)],
                cwd=ROOT,
                env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """`function(ranks, *arguments)` on every rank; the arguments are JSON. AssertionError with what they said where
        one fails.
        """
        self.begin(function, *arguments)
        said = [self._until_done(process) for process in self.processes]
        assert all(lines[-1:] == [DONE] for lines in said), "\n".join(line for lines in said for line in lines)

    def begin(self, function: Callable[..., None], *arguments: Any) -> None:
        call = json.dumps([function.__module__, function.__name__, arguments])
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(call + "\n")
            process.stdin.flush()

    def close(self) -> None:
        """All at once: none ends its part of a process group before the others."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    @staticmethod
    def _until_done(process: subprocess.Popen[str]) -> list[str]:
        """What it said up to the end of the call, or of the process."""
        assert process.stdout is not None
        lines: list[str] = []
        while lines[-1:] != [DONE] and (line := process.stdout.readline()):
            lines.append(line.rstrip("\n"))
        return lines


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    ranks = RankProcesses(2)
    yield ranks
    ranks.close()
