"""What it costs that a waiting thread of torch spins: two threads, alone and beside two busy processes.

OpenMP's own setting and ours (`tasks.pipeline.order.SPIN_COUNT`), in turns. Writes artifacts/bench/spinning.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import pytest

from tasks.core.files import write_json
from tasks.pipeline.order import SPIN_COUNT, SPIN_VARIABLE
from tests.benchmarks.demo import demo_params
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT

pytestmark = pytest.mark.bench
ROUNDS = 3
# Products and activations of the size of the demo's model.
WORK = """
import time, torch
torch.set_num_threads(2)
one, other, rows = torch.randn(256, 256), torch.randn(256, 1024), torch.randn(256, 1024)
began = time.perf_counter()
for _ in range(1500):
    torch.nn.functional.silu(one @ other) * rows
print(time.perf_counter() - began)
"""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def seconds(spin_count: str | None) -> float:
    environment = {name: value for name, value in os.environ.items() if name != SPIN_VARIABLE}
    if spin_count is not None:
        environment[SPIN_VARIABLE] = spin_count
    command = [sys.executable, "-c", WORK]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_threads_that_wait_asleep_are_as_fast_alone_and_much_faster_on_a_busy_machine() -> None:
    found: dict[str, dict[str, float]] = {}
    for name, busy in (("alone", 0), ("beside_two_busy_processes", 2)):
        with busy_processes(busy):
            pairs = [(seconds(None), seconds(SPIN_COUNT)) for _ in range(ROUNDS)]
        default, ours = (median(column) for column in zip(*pairs, strict=True))
        found[name] = {"default_seconds": round(default, 2), "ours_seconds": round(ours, 2)}
        print(f"\n{name}: {default:.2f} s as OpenMP has it, {ours:.2f} s with {SPIN_VARIABLE}={SPIN_COUNT}")
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "spinning.json", {"cpu": cpu_model(), **found})
    assert found["beside_two_busy_processes"]["ours_seconds"] < found["beside_two_busy_processes"]["default_seconds"]
