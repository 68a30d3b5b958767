"""Reflexion with as many episodes as RL: the test profile, from curation to the report's chart.

`python -m tests.benchmarks.reflexion FOLDER SEED…` prints one line of JSON per seed and leaves the chart of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tasks.core.settings import Paths, load
from tests.profiles import profile_params

CONTEXT = 640  # tokens: an episode of 128, its notes, the question and a note
REFLEXION = {
    "policy": "warm_start",
    "max_attempts": None,
    "question": "That attempt failed. In one sentence, what went wrong, and what will you do otherwise?",
    "max_note_tokens": 48,
    "max_memory_tokens": 256,
}


def params_of(seed: int) -> dict[str, Any]:
    params = profile_params("test")
    params["seed"] = seed
    params["model"]["embedded"] |= {"max_position_embeddings": CONTEXT}
    params["sentinel"] |= {"max_zero_variance_share": None}
    params["evaluate"] |= {"reflexion": REFLEXION}
    return params


def measure(folder: Path, seed: int) -> dict[str, Any]:
    """The row of evaluation.json; the trained snapshot's result is beside it as `best`."""
    from tasks.pipeline.order import stage_module
    from tasks.report.chart import progress_chart

    paths, params = Paths(folder / str(seed)), params_of(seed)
    for name in ("curate", "assess", "warm_start", "train", "evaluate"):
        if not paths.stage(name).exists():
            stage = stage_module(name)
            stage.run(load(stage.SETTINGS, params), paths)
    evaluation = read_json(paths.stage("evaluate") / "evaluation.json")
    progress_chart(paths, paths.artifacts / "progress.png")
    return {"seed": seed, "best": evaluation["test"]["best"], **evaluation["reflexion"]}


def main(arguments: Sequence[str]) -> None:
    folder, *seeds = arguments
    for seed in seeds:
        print(json.dumps(measure(Path(folder), int(seed))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
