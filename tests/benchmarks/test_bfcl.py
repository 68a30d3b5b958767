"""How fast bfcl plays and judges, beside the package's own checker: ground truths replayed, on one core.

Both play the same conversations in the same run, round by round in turn; a figure is the median of the rounds in CPU
time, since machines are shared. The package is timed inside its checker alone: what keeps its verdicts clean between
two problems (`forget`) is outside the clock. Written to artifacts/bench/bfcl.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import pytest
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from rich.console import Console

from tasks.commands.score import score_lines
from tasks.core.files import write_json
from tasks.core.records import Problem
from tasks.environments.bfcl.environment import BFCL
from tasks.environments.bfcl.problems import Turns, problems
from tasks.environments.bfcl.settings import BFCLCategory
from tasks.tools.base import block_until
from tests.benchmarks.demo import demo_params
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import Target, new_table
from tests.conftest import ROOT
from tests.environments.bfcl_mutations import call_text, forget, row_of

pytestmark = pytest.mark.bench
ROUNDS = 7
BASE: BFCLCategory = "multi_turn_base"
FLOOR = 2000.0
SCORE_FLOOR = 10_000 / 15  # ten thousand lines in a quarter of a minute
TARGET = Target("first_per_second", "first turns a second", FLOOR, unit="")
SCORE_TARGET = Target("score_lines_per_second", "lines through `score` a second", SCORE_FLOOR, unit="")

Figures = dict[str, Any]


def turnwise_seconds(world: BFCL, rows: Sequence[Problem]) -> float:
    """CPU seconds to play and judge every ground truth."""
    started = time.process_time()
    for problem in rows:
        episode = world.start(problem)
        for number, turn in enumerate(problem.reference):
            if number:
                episode.end_turn("")
            for call in turn.calls:
                block_until(episode.call(call.name, call.arguments))
        assert episode.verdict("").success
        episode.close()
    return time.process_time() - started


def package_seconds(rows: Sequence[Problem]) -> float:
    """CPU seconds that the package's checker takes to execute and judge the same calls."""
    seconds = 0.0
    for problem in rows:
        row, truth = row_of(problem)
        texts = [[[call_text(call, escaped=False) for call in turn.calls]] for turn in problem.reference]
        started = time.process_time()
        verdict = multi_turn_checker(texts, truth[: len(texts)], row, "", "turnwise")
        seconds += time.process_time() - started
        forget()
        assert verdict["valid"]
    return seconds


def score_seconds(world: BFCL, rows: Sequence[Problem]) -> float:
    """CPU seconds of the verb `score` in process: lines of JSON in, results out."""
    lines = [
        json.dumps(
            {"problem_id": problem.id, "turns": [[call.model_dump() for call in problem.reference[0].calls]]}
        ).encode()
        for problem in rows
    ]
    started = time.process_time()
    assert all(result["valid"] for result in score_lines(world, lines, world.find_problem))
    return time.process_time() - started


def side_by_side(world: BFCL, turns: Turns) -> Figures:
    """Episodes a second of both, on the same problems, the rounds of one between those of the other."""
    rows = problems(BASE, turns)
    cold = turnwise_seconds(BFCL(), rows)  # the first meeting makes a problem's scene
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(turnwise_seconds(world, rows))
        theirs.append(package_seconds(rows))
    seconds = {"turnwise": statistics.median(ours), "package": statistics.median(theirs)}
    return {
        "per_second": len(rows) / seconds["turnwise"],
        "package_per_second": len(rows) / seconds["package"],
        "ratio": seconds["package"] / seconds["turnwise"],
        "first_time_per_second": len(rows) / cold,
    }


def measure() -> Figures:
    world = BFCL()
    turnwise_seconds(world, problems(BASE, "all"))  # whatever is imported and read once
    figures: Figures = {
        f"{name}_{key}": value
        for name, turns in (("first", "first"), ("whole", "all"))
        for key, value in side_by_side(world, turns).items()  # type: ignore[arg-type]
    }
    rows = problems(BASE, "first")
    figures["score_lines_per_second"] = len(rows) / median(lambda: score_seconds(world, rows))
    return {**figures, "num_problems": len(rows), "rounds": ROUNDS, "machine": machine()}


def median(seconds_of: Callable[[], float]) -> float:
    return statistics.median(seconds_of() for _ in range(ROUNDS))


def machine() -> dict[str, str]:
    return {
        "cpu": cpu_model(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "bfcl_eval": version("bfcl-eval"),
    }


def show(figures: Figures, console: Console) -> None:
    """What bfcl.json holds, in one screen."""
    console.print(f"\nOn one core of {figures['machine']['cpu']}\n", highlight=False)
    targets = new_table("BFCL", "target", "figure", "")
    for target in (TARGET, SCORE_TARGET):
        targets.add_row(*target.row(figures[target.key]))
    console.print(targets)
    rates = new_table("A second of CPU time", "turnwise", "package", "ratio", "first meeting")
    for key, label in (("first", "first turn"), ("whole", "whole conversation")):
        numbers = [f"{figures[f'{key}_{name}']:,.0f}" for name in ("per_second", "package_per_second")]
        rates.add_row(
            label, *numbers, f"{figures[f'{key}_ratio']:.1f}×", f"{figures[f'{key}_first_time_per_second']:,.0f}"
        )
    console.print(rates)


def test_first_turns_are_played_at_two_thousand_a_second_on_one_core_and_lines_scored_in_seconds() -> None:
    figures = measure()
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "bfcl.json", figures)
    show(figures, Console())
    assert figures["first_per_second"] >= FLOOR
    assert figures["score_lines_per_second"] >= SCORE_FLOOR
