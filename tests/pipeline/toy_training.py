"""Stands in for `tasks/stages/train/stage.py` in a project: two ranks, and the step that the file `case` names."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tasks.core.settings import Paths
from tasks.learning.shared.ranks import Ranks, on_all_ranks
from tasks.stages.train.settings import TrainSections

SETTINGS = TrainSections


class Toy:
    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    @on_all_ranks
    def step(self, case: str) -> None:
        if case == "mistake of all":
            raise ValueError("the reward is no number, so nothing was learnt. Correct it.")
        if case == "error of one" and not self.ranks.leads:
            raise RuntimeError("gloo has no such sum")
        if case == "long":
            Path(f"started-{self.ranks.number}").touch()
            time.sleep(600)
        if case == "error of one":
            time.sleep(600)


def run(settings: TrainSections, paths: Paths, *, ranks: Ranks, **asked: Any) -> None:
    paths.stage("train").mkdir(parents=True)
    case = Path("case").read_text(encoding="utf-8")
    if case == "child":
        noted = "import json, os; json.dump(dict(os.environ), open('environment.json', 'w'))"
        subprocess.run([sys.executable, "-c", noted], check=True)
    Path("options").write_text(" ".join(sys.argv[1:]), encoding="utf-8")
    Toy(ranks).step(case)


def follow(settings: TrainSections, paths: Paths, ranks: Ranks) -> None:
    ranks.follow(Toy(ranks))
