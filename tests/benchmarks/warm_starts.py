"""Warm starts of several seeds: what curate and the base model give, trained without the rest of the flow.

`python -m tests.benchmarks.warm_starts FOLDER SEED…` prints one line of JSON per seed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.settings import Paths, load
from tasks.environments.catalog import load_environment
from tests.benchmarks.demo import demo_params


def prepare(params: dict[str, Any], paths: Paths) -> None:
    """Curated problems and the base model."""
    from tasks.stages.assess.base_model import prepare_base_model
    from tasks.stages.assess.settings import AssessSections
    from tasks.stages.curate.stage import SETTINGS
    from tasks.stages.curate.stage import run as curate

    curate(load(SETTINGS, params), paths)
    settings = load(AssessSections, params)
    with closing(load_environment(settings.environment)) as environment:
        paths.stage("assess").mkdir(parents=True, exist_ok=True)
        prepare_base_model(paths.base_model, settings, paths, environment)


def train_one(params: dict[str, Any], paths: Paths) -> dict[str, Any]:
    """The attempts and CPU seconds of the warm start, whose weights go into `warm_start/model`."""
    from tasks.stages.warm_start.run import WarmStartRun
    from tasks.stages.warm_start.settings import WarmStartSections

    settings, began = load(WarmStartSections, params), time.process_time()
    run = WarmStartRun(settings, paths, base=paths.base_model, resume=paths.artifacts / "resume")
    paths.stage("warm_start").mkdir(parents=True, exist_ok=True)
    run.train(paths.start_model)
    attempts = [asdict(attempt) for attempt in run.ended]
    return {"attempts": attempts, "cpu_seconds": round(time.process_time() - began, 1)}


def measure(folder: Path, seed: int, **changed: Any) -> dict[str, Any]:
    """The demo's warm start with another seed, one thread, and `warm_start` changed."""
    params, paths = demo_params(), Paths(folder / str(seed))
    params["seed"] = seed
    params["compute"]["num_threads"] = 1
    params["warm_start"] |= changed
    if not paths.stage("curate").exists():
        prepare(params, paths)
    return {"seed": seed, **train_one(params, paths)}


def main(arguments: Sequence[str]) -> None:
    folder, *seeds = arguments
    for seed in seeds:
        print(json.dumps(measure(Path(folder), int(seed))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
