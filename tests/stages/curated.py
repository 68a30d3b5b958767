"""What `curate` leaves, in small: twenty problems in every split, each with its demonstration."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tasks.core.files import write_jsonl
from tasks.core.settings import Paths
from tasks.environments.travel_desk.environment import TravelDesk
from tests import tiny
from tests.conftest import ROOT
from tests.profiles import profile_text

PROBLEMS = tiny.problems(20, max_level=1)


def curated_project(folder: Path, patch: pytest.MonkeyPatch) -> Paths:
    """Makes `folder` the working folder: the checkout's code, and params.yaml of the profile `test`."""
    patch.chdir(folder)
    Path("params.yaml").write_text(profile_text("test"), encoding="utf-8")
    for name in ("tasks", "infra", "dvc.yaml"):
        Path(name).symlink_to(ROOT / name)
    made, world = Paths("artifacts"), TravelDesk()
    for split in ("train", "select", "test"):
        write_jsonl(made.split(split), (problem.model_dump() for problem in PROBLEMS))
    shown = [world.demonstrate(problem, random.Random(number)) for number, problem in enumerate(PROBLEMS)]
    write_jsonl(made.stage("curate") / "demonstrations.jsonl", (item.model_dump() for item in shown if item))
    return made
