"""One rank of short runs of `train_policy`: `python -m tests.stages.train.ranks_worker START PLACE`.

Rank 0 leaves each run's output in PLACE/NAME. The reward is one an untrained model earns, so that weights move.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tasks.core.settings import load
from tasks.learning.shared.ranks import ALONE, END, Ranks
from tasks.stages.train import groups as grouping
from tasks.stages.train.policy import follow_leader
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import train_policy
from tests import tiny
from tests.pipeline.training_worker import CHANGED, unwatched
from tests.profiles import profile_params

LORA = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"lora": LORA},
    "ahead": {"max_staleness": 1, "importance_correction": "token_truncate"},
}


def settings(name: str) -> TrainSections:
    params = profile_params("test")
    params["train"] |= {**CHANGED, "num_iterations": 2, "snapshot_interval": 1, "schedule": "constant", **RUNS[name]}
    params["sentinel"] |= unwatched(params["sentinel"])
    return load(TrainSections, params)


def main(start: Path, place: Path) -> None:
    is_alone = os.environ["WORLD_SIZE"] == "1"
    ranks = ALONE if is_alone else Ranks.meet(torch.device("cpu"), timeout_seconds=60)
    grouping.reward = tiny.reward_of_any_text
    for name in RUNS:
        if not ranks.leads:
            follow_leader(settings(name), start, ranks)
            continue
        train_policy(
            settings(name), start=start, problems=tiny.problems(40), output=place / name,
            resume=place / f"{name}-resume", alarms=place / "alarms", ranks=ranks,
        )  # fmt: skip
        ranks.announce(END)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
