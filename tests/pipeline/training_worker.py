"""A short GRPO run in a process of its own, for tests that kill it: `python training_worker.py START PLACE`.

It says "ready" when the first iteration begins. The reward is one an untrained model earns, so that weights move.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tasks.core.records import Problem, Score, Trajectory
from tasks.core.settings import load
from tasks.stages.train import groups as grouping
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import train_policy
from tests import tiny
from tests.profiles import profile_params

CHANGED = {
    "num_iterations": 20, "snapshot_interval": 4, "checkpoint_interval": 2, "problems_per_iteration": 4,
    "group_size": 4, "problem_sampler": "uniform", "filter_overlong": False, "kl_weight": 0.01,
    "reference_interval": 3, "schedule": "cosine",
}  # fmt: skip


def reward(problem: Problem, trajectory: Trajectory, settings: Any) -> Score:
    return Score(sum(trajectory.sequences[0].token_ids) % 7 / 7, {})


def unwatched(sentinel: dict[str, Any]) -> dict[str, None]:
    """No thresholds: the made-up reward teaches nonsense, and a sentinel would rightly stop it."""
    return {name: None for name in sentinel if name.startswith(("max_", "min_")) and name != "max_rollbacks"}


def main(start: Path, place: Path) -> None:
    params = profile_params("test")
    params["train"] |= CHANGED
    params["sentinel"] |= unwatched(params["sentinel"])
    grouping.reward = reward
    print("ready", flush=True)
    train_policy(
        load(TrainSections, params), start=start, problems=tiny.problems(40), output=place / "output",
        resume=place / "resume", alarms=place / "alarms",
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
