"""What the options of exploration and credit do to a short training: the test profile, each seed from one warm start.

`python -m tests.benchmarks.exploration FOLDER SEED…` prints one line of JSON per variant and seed. A folder that has a
seed's warm start is used again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.rollouts.settings import DistributionSettings
from tests.benchmarks.warm_starts import prepare, train_one
from tests.learning.options import NO_EXPLORATION
from tests.profiles import profile_params

NUM_ITERATIONS, NUM_SAMPLES = 16, 4
OFF = NO_EXPLORATION


def points(first: float, last: float) -> list[dict[str, Any]]:
    return [{"iteration": 1, "value": first}, {"iteration": NUM_ITERATIONS // 2, "value": last}]


def prefixes(source: str, first: float, last: float) -> dict[str, Any]:
    """A share of the groups; any number of turns but the last is replayed."""
    return {**OFF, "prefixes": {"source": source, "share": points(first, last), "depth": points(1.0, 1.0)}}


VARIANTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "leave_one_out": {"advantage": "leave_one_out"},
    "turn_leave_one_out": {"advantage": "turn_leave_one_out"},
    "keep 4 of 8": {"exploration": {**OFF, "keep": 4}},
    "keep 8 of 16": {"group_size": 16, "exploration": {**OFF, "keep": 8}},
    "temperature 1.9 to 1.3": {"exploration": {**OFF, "temperature": points(1.9, 1.3)}},
    "8 samples, then 4": {"exploration": {**OFF, "samples_per_problem": points(8, 4)}},
    "half from a reference's start": {"exploration": prefixes("reference", 0.5, 0.5)},
    "half, then none": {"exploration": prefixes("reference", 0.5, 0.0)},
    "as usual, 32 problems": {},
    "half from own starts, 32 problems": {"exploration": prefixes("own", 0.5, 0.5)},
    "as usual, one update": {"updates_per_batch": 1},
    "top-p 0.9, one update": {"updates_per_batch": 1, "exploration": {**OFF, "top_p": points(0.9, 0.9)}},
    "top-p 0.7 to 1, one update": {"updates_per_batch": 1, "exploration": {**OFF, "top_p": points(0.7, 1.0)}},
}
NUCLEUS = DistributionSettings(temperature=1.6, top_p=0.9)
FEW = 32  # problems that come back every second iteration


def params_of(seed: int) -> dict[str, Any]:
    params = profile_params("test")
    params["seed"] = seed
    params["sentinel"] |= {"max_zero_variance_share": None}  # a variant may fail
    return params


def measure(folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """One row per variant: success in the last quarter of training and on select, as training draws and in a nucleus,
    episodes and CPU seconds; or the alarm that stopped it.
    """
    from tasks.rollouts.collect import sample_episodes
    from tasks.stages.train.settings import TrainSections
    from tasks.stages.train.stage import CollapseAlarm, train_policy

    paths = Paths(folder / str(seed))
    if not (paths.start_model).exists():
        prepare(params_of(seed), paths)
        train_one(params_of(seed), paths)
    for name, changed in VARIANTS.items():
        params, problems = params_of(seed), read_split(paths, "train")
        params["train"] |= {"num_iterations": NUM_ITERATIONS, "snapshot_interval": NUM_ITERATIONS, **changed}
        settings = load(TrainSections, params)
        place, began = paths.artifacts / "variants" / name, time.process_time()
        try:
            rows = train_policy(
                settings, start=paths.start_model,
                problems=problems[:FEW] if name.endswith(f"{FEW} problems") else problems,
                output=place / "output", resume=place / "resume", alarms=place / "alarms",
            )  # fmt: skip
        except CollapseAlarm as stop:
            yield {"variant": name, "seed": seed, "stopped_at": stop.alarm.iteration, "signal": stop.alarm.signal}
            continue
        seconds = time.process_time() - began
        (snapshot,) = (place / "output" / "snapshots").iterdir()
        with closing(load_environment(settings.environment)) as environment:
            select = read_split(paths, "select")
            whole, nucleus = (
                sample_episodes(snapshot, environment, select, play, stage="evaluate", label=name)
                for play in (settings.play(NUM_SAMPLES), settings.play(NUM_SAMPLES, drawn_from=NUCLEUS))
            )
        last = rows[-NUM_ITERATIONS // 4 :]
        yield {
            "variant": name,
            "seed": seed,
            "first": rows[0]["success_rate"],
            "last_quarter": sum(row["success_rate"] for row in last) / len(last),
            "select": sum(item.is_success for item in whole) / len(whole),
            "select_in_nucleus": sum(item.is_success for item in nucleus) / len(nucleus),
            "prefixed_groups": sum(row.get("num_prefixed_groups", 0) for row in rows),
            "episodes": sum(row["num_episodes"] for row in rows),
            "cpu_seconds": round(seconds, 1),
        }


def main(arguments: Sequence[str]) -> None:
    folder, *seeds = arguments
    for seed in seeds:
        for row in measure(Path(folder), int(seed)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
