"""What a chunked head saves: peak memory of log-probs and gradients over a large vocabulary, whole and in chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.head import VOCABULARY, WIDTH

pytestmark = pytest.mark.bench
NUM_POSITIONS = 1024
MATRIX = 4 * VOCABULARY * WIDTH  # bytes of the head's gradient


def test_chunks_hold_the_gradient_of_the_head_twice_and_a_few_logits() -> None:
    """Whole, 1,024 positions have 0.6 GB of logits and about four times that; chunks of 110 have a tenth of it."""
    whole, chunked = measure(NUM_POSITIONS), measure(0)
    print(f"whole {whole['bytes'] / 1e9:.2f} GB, {whole['seconds']:.1f} s")
    print(f"chunks of 64 MiB {chunked['bytes'] / 1e9:.2f} GB, {chunked['seconds']:.1f} s")
    assert chunked["bytes"] < 3 * MATRIX + 0.5e9 < whole["bytes"]


def measure(size: int) -> dict[str, float]:
    """0 is the size that the trainer chooses."""
    command = [sys.executable, "-m", "tests.benchmarks.head", str(NUM_POSITIONS), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
