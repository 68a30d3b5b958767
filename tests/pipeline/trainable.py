"""A project in which only `train` is left to do: a tiny untrained model, and a reward that it can earn."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tasks.core.files import write_json, write_jsonl
from tasks.core.settings import Paths
from tasks.drift.pin import make_pin, play_probes, write_pin
from tasks.environments.travel_desk.environment import TravelDesk
from tests import tiny
from tests.pipeline.project import ROOT, Project
from tests.pipeline.training_worker import unwatched
from tests.profiles import profile_params
from tests.worlds import environment_settings

REWARD = "def score(problem, trajectory):\n    return sum(trajectory.sequences[0].token_ids) % 7 / 7\n"
SMALL = {
    "num_iterations": 8, "problems_per_iteration": 4, "group_size": 4, "snapshot_interval": 4, "checkpoint_interval": 1,
    "problem_sampler": "uniform", "filter_overlong": False, "kl_weight": 0.01, "reference_interval": 3,
}  # fmt: skip
GATE = {"gate": "warm_start", "success_rate": 0.1, "ci_low": 0.0, "ci_high": 0.3, "num_problems": 20}


def make_trainable(folder: Path) -> Project:
    """Its code is a copy, with what was compiled of it, since the reward is a file of tasks/custom."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "tasks", folder / "tasks")
    shutil.copy(ROOT / "dvc.yaml", folder / "dvc.yaml")
    (folder / "tasks" / "custom" / "any_text.py").write_text(REWARD, encoding="utf-8")
    params = profile_params("test")
    params["train"] |= SMALL
    params["sentinel"] |= unwatched(params["sentinel"])
    own = {"name": "any_text", "weight": 0.5, "function": "tasks.custom.any_text:score"}
    params["reward"] |= {"parts": [own]}
    params["launch"] |= {"meet_seconds": 120.0}
    params["model"]["path"] = "base"
    (folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    with _inside(folder):
        _leave_what_comes_before(Paths("artifacts"))
    return Project(folder)


def _leave_what_comes_before(paths: Paths) -> None:
    """What curate, assess and warm_start leave."""
    problems, world = tiny.problems(20, max_level=1), TravelDesk()
    for split in ("train", "select", "test"):
        write_jsonl(paths.split(split), (problem.model_dump() for problem in problems))
    shown = [world.demonstrate(problem, random.Random(number)) for number, problem in enumerate(problems)]
    write_jsonl(paths.stage("curate") / "demonstrations.jsonl", (item.model_dump() for item in shown if item))
    probed = problems[:2]
    write_pin(paths.stage("curate"), make_pin(world, probed, [play_probes(environment_settings(), probed)]))
    write_json(paths.stage("assess") / "baseline.json", {**GATE, "samples_per_problem": 1})
    tiny.model_folder(Path("base"))
    shutil.copytree("base", paths.start_model)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
