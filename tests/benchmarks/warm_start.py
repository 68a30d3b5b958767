"""Two steps of a supervised warm start of a model of a real size, with random weights, and the checkpoint of the first:
its memory, in a process of its own.

`python -m tests.benchmarks.warm_start FOLDER VARIANT` prints one line of JSON. Demonstrations are random tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.settings import load
from tests.benchmarks.at_size import NUM_WORDS, Variant, peak_memory, shape_of, variant_params
from tests.benchmarks.made_up import random_ids

LENGTH, WRITTEN = 1000, 100  # tokens of a demonstration; of them, the assistant's
ROWS = 4


def params_of(variant: Variant) -> dict[str, Any]:
    """Those of an iteration, with demonstrations that are shorter than an episode and fill one forward."""
    params = variant_params(variant)
    params["sampling"]["max_tokens_per_episode"] = LENGTH
    params["warm_start"] |= {"num_steps": 2, "batch_size": ROWS, "micro_batch_tokens": ROWS * LENGTH}
    return params


def run(folder: Path, variant: Variant) -> dict[str, float]:
    """Bytes at the peak: loading the model, a step, and the next one while the checkpoint is written."""
    from tasks.learning.sft.trainer import SupervisedTrainer
    from tasks.learning.shared.checkpoints import Checkpoints
    from tasks.learning.shared.rows import Row
    from tasks.models.folders import load_model
    from tasks.planning.setup import PlanSections

    settings = load(PlanSections, params_of(variant))
    mask = [index >= LENGTH - WRITTEN for index in range(LENGTH)]
    rows = [Row(random_ids(LENGTH, NUM_WORDS, seed=seed), mask, [0.0] * LENGTH, 1.0) for seed in range(ROWS)]
    peaks = {}
    trainer = SupervisedTrainer(
        load_model(folder / "model", compute=settings.compute), rows, settings.warm_start, seed=0
    )
    peaks["load"] = peak_memory()
    checkpoints = Checkpoints(folder / "resume", unit="step")
    for name in ("first step", "next step"):
        trainer.step()
        peaks[name] = peak_memory()
        checkpoints.save(trainer.optimizer.steps_done, trainer.tensors(), trainer.state())
    checkpoints.close()
    return peaks


def planned(variant: Variant) -> float:
    from tasks.planning.hardware import this_machine
    from tasks.planning.memory import warm_start_memory
    from tasks.planning.setup import PlanSections, Setup

    settings = load(PlanSections, params_of(variant))
    return warm_start_memory(Setup(shape_of(variant), settings, this_machine(settings.compute))).peak


def main(arguments: Sequence[str]) -> None:
    folder, told = arguments
    print(json.dumps(run(Path(folder), Variant(**json.loads(told)))))


if __name__ == "__main__":
    main(sys.argv[1:])
