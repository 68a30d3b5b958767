"""Choosing among 4, 16 and 64 snapshots with and without racing: seconds, episodes, and whether the choice is as good.

The snapshots lie on the demo's own learning curve, between stored ones where there are more of them than the demo left.
Cost should grow slower than their number. Writes artifacts/bench/evaluation.json. And how much of `evaluate` of 16
snapshots is not playing, beside an earlier commit in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks.core.files import write_json
from tasks.core.records import Problem
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.measurement.statistics import paired_difference
from tasks.models.folders import load_model, load_tokenizer, save_snapshot
from tasks.models.settings import on_cpu
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.stage import choose
from tests.benchmarks.demo import demo_artifacts, demo_params
from tests.benchmarks.evaluation_share import compare, prepare, quartiles
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import new_table

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
COUNTS = (4, 16, 64)

Row = dict[str, Any]


def curve(stored: Sequence[Path], count: int, folder: Path) -> dict[str, Path]:
    """`count` snapshots spread evenly over the curve that starts at the first stored one and ends at the last."""
    snapshots = {}
    for number in range(count):
        place = (number + 1) / count * (len(stored) - 1)
        before = min(int(place), len(stored) - 2)
        name = f"iteration-{number + 1:04d}"
        snapshots[name] = folder / name
        _save_between(stored[before], stored[before + 1], place - before, folder / name)
    return snapshots


def _save_between(first: Path, second: Path, share: float, folder: Path) -> None:
    import torch

    model, other = (
        load_model(first, compute=on_cpu(1)),
        load_model(second, compute=on_cpu(1)),
    )
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, share)
    save_snapshot(folder, model, load_tokenizer(first))


def measured(snapshots: dict[str, Path], select: list[Problem], settings: EvaluateSections, folder: Path) -> Row:
    """One choice from scratch, with what it took; episodes of the winner to compare winners by."""
    with (
        closing(load_environment(settings.environment)) as world,
        closing(EpisodeRunner(world, plays=settings.plays, resume=folder)) as player,
    ):
        started = time.perf_counter()
        outcome = choose(snapshots, select, settings, player)
        seconds = time.perf_counter() - started
        return {
            "seconds": round(seconds, 2),
            "episodes": int(sum(spent["episodes"] for spent in player.timings["select"].values())),
            "snapshots_by_round": [len(row["snapshots"]) for row in outcome.rounds],
            "winner": outcome.winner,
            "winners_episodes": player.play(snapshots[outcome.winner], select, "select", outcome.winner),
        }


def comparison(paths: Paths, folder: Path, counts: Sequence[int], num_problems: int | None = None) -> list[Row]:
    params = demo_params()
    params["evaluate"]["frontier"] = None
    racing = EvaluateSections.model_validate({name: params[name] for name in EvaluateSections.model_fields})
    without = racing.model_copy(update={"evaluate": racing.evaluate.model_copy(update={"racing": None})})
    stored = [paths.start_model, *sorted((paths.stage("train") / "snapshots").iterdir())]
    select, rows = read_split(paths, "select")[:num_problems], []
    for count in counts:
        snapshots = curve(stored, count, folder / str(count))
        raced = measured(snapshots, select, racing, folder / f"raced_{count}")
        played = measured(snapshots, select, without, folder / f"played_{count}")
        winners = raced.pop("winners_episodes"), played.pop("winners_episodes")
        gap = paired_difference(*winners, confidence=racing.evaluate.confidence)
        rows.append({"snapshots": count, "racing": raced, "without": played, "winner_minus_winner": dict(gap)})
    return rows


def test_racing_grows_slower_than_the_number_of_snapshots(tmp_path: Path) -> None:
    paths = demo_artifacts()
    rows = comparison(paths, tmp_path, COUNTS)
    write_json(paths.artifacts / "bench" / "evaluation.json", {"rows": rows, "machine": cpu_model()})
    table = new_table("Choosing on select", "racing, s", "episodes", "without, s", "episodes", "winners differ by")
    for row in rows:
        numbers = [f"{row[kind][what]:,}" for kind in ("racing", "without") for what in ("seconds", "episodes")]
        gap = f"{100 * row['winner_minus_winner']['difference']:+.1f} points"
        table.add_row(f"{row['snapshots']} snapshots", *numbers, gap)
    Console().print(table)
    few, some, many = (row["racing"]["episodes"] for row in rows)
    assert some < 4 * few and many < 4 * some
    assert all(row["winner_minus_winner"]["ci_low"] <= 0 <= row["winner_minus_winner"]["ci_high"] for row in rows)


def test_evaluate_of_sixteen_snapshots_takes_little_more_than_their_playing(tmp_path: Path) -> None:
    paths = demo_artifacts()
    stored = [paths.start_model, *sorted((paths.stage("train") / "snapshots").iterdir())]
    prepare(paths, tmp_path, lambda folder: curve(stored, 16, folder))
    found = compare(tmp_path, num_pairs=3)
    write_json(paths.artifacts / "bench" / "evaluation_share.json", {**found, "machine": cpu_model()})
    table = new_table("evaluate over its playing", "first quartile", "median", "third", "CPU s beside playing")
    for name, runs in found.items():
        beside = sorted(run["cpu_beside_playing"] for run in runs)[len(runs) // 2]
        table.add_row(name, *(f"{ratio:.3f}" for ratio in quartiles(runs)), f"{beside:.1f}")
    Console().print(table)
    assert quartiles(found["now"])[1] < quartiles(found["before"])[1]
