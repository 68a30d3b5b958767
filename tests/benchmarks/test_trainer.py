"""How fast the trainer is: against TRL, against padded rows, against what this machine's arithmetic allows.

Every figure is a ratio taken in one run on one machine. Writes artifacts/bench/trainer.json and trainer_scaling.png and
prints tables that say which targets are met. A missed one fails no test: it is a line of the table, in plain sight.
"""

from __future__ import annotations

import math
import os
import platform
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from tasks.core.files import write_json
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.learning.shared.batching import micro_batches
from tasks.learning.shared.policy import token_logp
from tasks.learning.shared.rows import rows_of
from tasks.models.settings import EmbeddedModelSettings
from tests.benchmarks import demo_iterations, floor, on_cuda, packing, scaling, trl_step
from tests.benchmarks.demo import demo_artifacts, demo_params
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.made_up import random_group, random_model
from tests.benchmarks.scaling_figure import scaling_figure
from tests.benchmarks.trainer_table import CURVES, TARGETS, in_words, show

pytestmark = pytest.mark.bench
TRL_ROUNDS, PACKING_ROUNDS, SCALING_ROUNDS = 4, 2, 4
Figures = dict[str, Any]


@pytest.mark.timeout(1800)  # minutes, and those of a demo where there is none yet
def test_the_trainer_is_as_fast_as_promised() -> None:
    paths, console = demo_artifacts(), Console()
    figures = measure(paths, demo_params(), console)
    written, figure = (paths.artifacts / "bench" / name for name in ("trainer.json", "trainer_scaling.png"))
    write_json(written, figures)
    scaling_figure(figures["scaling"], in_words(figures["machine"]), paths, figure)
    show(figures, console)
    console.print(f"\n{written}\n{figure}", soft_wrap=True, highlight=False)
    measured = [target.key for target in TARGETS if target.key != "cuda_mfu"]
    assert all(math.isfinite(figures[key]) and figures[key] > 0 for key in measured)
    assert all(math.isfinite(slope) for key in CURVES for slope in figures["scaling"][key]["slope"].values())


def measure(paths: Paths, params: dict[str, Any], console: Console) -> Figures:
    """All figures, one part after another, each on the demo's number of threads."""
    threads, warm_start = params["compute"]["num_threads"], paths.start_model
    console.print("\nMeasuring iterations of the demo …")
    played = demo_iterations.play(paths, params, num_threads=threads)
    iteration, arithmetic = demo_iterations.shares(played), floor.measure(played)
    console.print("Measuring how time grows …")
    growth = scaling.measure(params, num_threads=threads, rounds=SCALING_ROUNDS)
    console.print("Measuring against TRL …")
    train = read_split(paths, "train")
    trl = trl_step.measure(warm_start, train, params, num_threads=threads, rounds=TRL_ROUNDS)
    console.print("Measuring against padded rows …")
    packed = packing.measure(num_threads=threads, rounds=PACKING_ROUNDS)
    cuda = on_cuda.measure()
    return {
        "trl_step_ratio": trl["trl_step_ratio"],
        "tree_packing_speedup": packed["speedup"],
        "tree_packing_memory_ratio": packed["memory_ratio"],
        "environment_share": iteration["environment_share"],
        "checkpoint_share": iteration["checkpoint_share"],
        "floor_share": arithmetic["floor_share"],
        "cuda_mfu": cuda["mfu"] if isinstance(cuda, dict) else None,
        "scaling": growth,
        "details": {"trl": trl, "packing": packed, "iteration": iteration, "floor": arithmetic, "cuda": cuda},
        "machine": machine(threads),
    }


def machine(num_threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "num_threads": num_threads,
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def test_the_floor_counts_each_matrix_product_once() -> None:
    """A prompt of 3 tokens and two trajectories that sample 2 each; the last of them is predicted, never read.

    Positions: 3 + 1 + 1. Pairs: 1 + 2 + 3 in the prompt, 4 for each position after it. Logits: 1 + 1 + 1.
    """
    settings = EmbeddedModelSettings(**demo_params()["model"]["embedded"])
    model = random_model(50, settings)
    group = random_group(prompt=3, sampled=2, size=2, vocabulary=50)
    rows = [row for trajectory in group.trajectories for row in rows_of(trajectory, 1.0)]
    expected = floor.Work(positions=5, pairs=14, logits=3)
    assert floor.rollout_work(group) == floor.tree_work([rows]) == expected
    (batch,) = micro_batches([rows], packing="tree", max_tokens=100, device=torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:  # it counts no attention on CPU
        token_logp(model, batch)
    assert counter.get_total_flops() == floor.forward_operations(model, floor.Work(positions=5, logits=3))
    assert floor.forward_operations(model, floor.Work(pairs=1)) == 4 * settings.hidden_size * settings.num_hidden_layers
