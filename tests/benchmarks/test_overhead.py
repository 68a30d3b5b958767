"""What DVC costs over the plain stages, and the flow (Prefect, MLflow, its server) over DVC, in a fresh folder each.

The flow also runs doctor, promote and report, so after `dvc repro` these run too, as processes of their own. The test
profile is short, so its shares are large; the seconds are about the same whatever the recipe, and the last line says
what they would be of the demo.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from tests.benchmarks.machine import cpu_model
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.bench

STAGES = ("curate", "assess", "warm_start", "train", "evaluate")
DEMO_SECONDS = 258.0  # of infra/benchmarks.md


def run_plain(project: Project) -> None:
    for stage in STAGES:
        run(project, "tasks", stage)


def run_dvc(project: Project) -> None:
    run(project, "dvc", "repro")


def ask_dvc(project: Project) -> None:
    run(project, "dvc", "status")


def finish(project: Project) -> None:
    for command in ("doctor", "promote", "report"):
        run(project, "tasks", command)


def run_flow(project: Project) -> None:
    run(project, "flows", "run")


def run(project: Project, *command: str) -> None:
    done = project.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


class Cost(NamedTuple):
    seconds: float
    of_a_processor: float


def measured(project: Project, work: Callable[[Project], None]) -> Cost:
    before, started = processor_seconds(), time.monotonic()
    work(project)
    return Cost(time.monotonic() - started, processor_seconds() - before)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_overhead_of_the_flow_and_of_dvc(tmp_path: Path) -> None:
    plain, dvc, flow = (make_project(tmp_path / name) for name in ("plain", "dvc", "flow"))
    print(f"\n{cpu_model()}, the test profile")
    stages, repro = shown("plain stages", plain, run_plain), shown("dvc repro", dvc, run_dvc)
    rest, whole = shown("doctor, promote, report", dvc, finish), shown("flow", flow, run_flow)
    compare("dvc repro over plain stages", repro, stages)
    compare("flow over dvc repro and the rest", whole, Cost(*map(sum, zip(repro, rest, strict=True))))
    show_second_runs(flow)


def show_second_runs(project: Project) -> None:
    """With nothing changed, beside what `dvc status` costs; the goal is 2 times that."""
    rounds = [(measured(project, run_flow), measured(project, ask_dvc)) for _ in range(5)]
    for kind, *pairs in zip(("s", "s of a processor"), *([*zip(*pair, strict=True)] for pair in rounds), strict=True):
        flow, status = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        print(f"  flow with nothing changed: {flow:.2f} {kind}, dvc status {status:.2f}, {ratio:.1f} times", flush=True)


def shown(name: str, project: Project, work: Callable[[Project], None]) -> Cost:
    cost = measured(project, work)
    print(f"  {name}: {cost.seconds:.1f} s, {cost.of_a_processor:.1f} s of a processor", flush=True)
    return cost


def compare(name: str, cost: Cost, base: Cost) -> None:
    for kind, one, other in zip(("s", "s of a processor"), cost, base, strict=True):
        extra = one - other
        print(f"  {name}: {extra:+.1f} {kind}, {extra / other:.1%} here, {extra / DEMO_SECONDS:.1%} of the demo's")
