"""Seconds of `evaluate` over those in which episodes play, of this commit and of one before, in turns.

Playing is `Collector.collect` without what is stored of each episode as it ends, which is counted by the thread's own
processor time: the other clocks take longer to read than an episode to store. Each run is a process of its own on one
folder of snapshots; imports come before the clock, which stands still while the thread waits for a processor.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.core.records import Trajectory
from tasks.core.settings import Paths, load, read_params
from tests.benchmarks.at_parent import write_tree
from tests.benchmarks.quiet import quiet_now
from tests.conftest import ROOT

BEFORE = "fe036c3b13d3117a1100d4ff592036ad49527682"
CARRIED = ("tests/benchmarks/evaluation_share.py", "tests/benchmarks/at_parent.py", "tests/benchmarks/quiet.py")
KEPT = ("curate", "assess", "warm_start")  # stages whose results evaluate reads

Share = dict[str, float]


def prepare(demo: Paths, folder: Path, snapshots: Callable[[Path], object]) -> None:
    """What evaluate reads of the demo's results, with other snapshots."""
    made = Paths(folder / "artifacts")
    for stage in KEPT:
        shutil.copytree(demo.stage(stage), made.stage(stage))
    made.stage("train").mkdir()
    shutil.copyfile(demo.stage("train") / "metrics.jsonl", made.stage("train") / "metrics.jsonl")
    snapshots(made.stage("train") / "snapshots")


def compare(folder: Path, *, num_pairs: int) -> dict[str, list[Share]]:
    """Runs of both commits in turns, on the folder that `prepare` made."""
    tree = folder / "tree"
    write_tree(tree, commit=BEFORE, carried=CARRIED)
    found: dict[str, list[Share]] = {"before": [], "now": []}
    for _ in range(num_pairs):
        for name, root in (("before", tree), ("now", ROOT)):
            found[name].append(_run(root, folder))
    return found


def quartiles(runs: Sequence[Share]) -> list[float]:
    """Of evaluate's seconds over those of playing."""
    ratios = [run["seconds"] / run["playing"] for run in runs]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def _run(root: Path, folder: Path) -> Share:
    command = [sys.executable, "-m", "tests.benchmarks.evaluation_share", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path) -> Share:
    from tasks.models.folders import load_model
    from tasks.models.settings import on_cpu
    from tasks.pipeline.order import prepare_process
    from tasks.rollouts.collect import Collector
    from tasks.rollouts.load import Engines  # noqa: F401
    from tasks.stages.evaluate import stage
    from tasks.stages.evaluate.settings import EvaluateSections

    params = read_params()
    prepare_process(params)
    load_model(folder / "artifacts" / "warm_start" / "model", compute=on_cpu(1))  # what else a stage imports
    playing = {"seconds": 0.0, "cpu": 0.0}
    collect = Collector.collect

    def clocked(self: Collector, keys: Any, on_end: Callable[[Trajectory], None]) -> list[Trajectory]:
        def end(trajectory: Trajectory) -> None:
            began = time.thread_time()
            on_end(trajectory)
            spent = time.thread_time() - began
            playing["seconds"] -= spent
            playing["cpu"] -= spent

        began = quiet_now(), time.process_time()
        played = collect(self, keys, end)
        playing["seconds"] += quiet_now() - began[0]
        playing["cpu"] += time.process_time() - began[1]
        return played

    Collector.collect = clocked  # type: ignore[method-assign, assignment]
    settings = load(EvaluateSections, params)
    began = quiet_now(), time.process_time()
    stage.run(settings, Paths(folder / "artifacts"))
    seconds, cpu = quiet_now() - began[0], time.process_time() - began[1]
    return {
        "seconds": seconds,
        "playing": playing["seconds"],
        "cpu_beside_playing": cpu - playing["cpu"],
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
