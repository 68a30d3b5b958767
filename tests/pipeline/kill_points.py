"""kill -9 at random points of a training run, and whether what comes out in the end is bitwise the same."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.core.files import content_hash
from tests.conftest import ROOT


@dataclass(frozen=True)
class Whole:
    """A run that was never killed: its folder, its hash, and how long it trained."""

    place: Path
    hash: str
    seconds: float


def start_worker(start: Path, place: Path) -> subprocess.Popen[str]:
    """The worker, once it has begun."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pipeline.training_worker", str(start), str(place)]
    worker = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def whole_run(start: Path, place: Path) -> Whole:
    worker = start_worker(start, place)
    began = time.monotonic()
    assert worker.wait(timeout=300) == 0
    return Whole(place, result_hash(place), time.monotonic() - began)


def killed_and_resumed(start: Path, place: Path, whole: Whole, rng: random.Random) -> tuple[str, int]:
    """Kill a run at a random moment, let it end; its result's hash, and from which checkpoint it went on (0: none)."""
    worker = start_worker(start, place)
    time.sleep(rng.random() * 0.9 * whole.seconds)
    worker.kill()
    worker.wait()
    shutil.rmtree(place / "output", ignore_errors=True)
    steps = sorted(int(item.name.removeprefix("iteration-")) for item in (place / "resume").glob("iteration-*"))
    assert start_worker(start, place).wait(timeout=300) == 0
    return result_hash(place), steps[-1] if steps else 0


def result_hash(place: Path) -> str:
    """Of snapshots, metrics and last checkpoint: weights, optimizer, reference, curriculum, sentinel, random state."""
    last = max((place / "resume").glob("iteration-*"))
    return content_hash(place / "output") + content_hash(last)
