"""From the records of a run, artifacts/timings: its episodes, and how fast its engine and trainer were.

The engine's speed is a least-squares fit with non-negative terms over turns: seconds = step · tokens + row · tokens of
all turns meanwhile + fed_token · tokens fed meanwhile. What the process spends on environments between steps is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from tasks.core.files import read_jsonl
from tasks.planning.seconds import DecodeCosts
from tasks.planning.simulation.workload import EngineSpeed, EpisodeTurns, Speeds, TurnSizes, Workload, costs_of_group

FEWEST_EPISODES, FEWEST_ITERATIONS = 8, 3
OF_ITERATIONS, OF_EPISODES = ("iteration", "episodes", "update_seconds"), ("problem_id", "draw", "turns")
WARM_UP = 1  # iterations that are left out: the first loads what later ones find loaded


def read_records(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows per iteration and per episode; ValueError where no run left them, or too few."""
    iterations, episodes = (folder / name for name in ("train.jsonl", "turns.jsonl"))
    missing = next((path for path in (iterations, episodes) if not path.exists()), None)
    if missing is not None:
        raise ValueError(
            f"{missing} is not there, so there are no turns, tokens and seconds to simulate from. Train a few "
            f"iterations first: python -m tasks train."
        )
    found = [row for _, row in read_jsonl(iterations)], [row for _, row in read_jsonl(episodes)]
    if len(found[0]) < FEWEST_ITERATIONS or len(found[1]) < FEWEST_EPISODES:
        raise ValueError(
            f"{folder} has {len(found[0])} iterations and {len(found[1])} episodes, too few to draw from. Train at "
            f"least {FEWEST_ITERATIONS} iterations with {FEWEST_EPISODES} episodes: set train.num_iterations."
        )
    for path, rows, names in ((iterations, found[0], OF_ITERATIONS), (episodes, found[1], OF_EPISODES)):
        if lacks := next((name for row in rows for name in names if name not in row), None):
            raise ValueError(
                f"{path}: a row has no {lacks}, so it is damaged or another version's. Train again: "
                f"python -m tasks train."
            )
    return found


def recorded_groups(episodes: Sequence[dict[str, Any]]) -> list[list[EpisodeTurns]]:
    groups: dict[tuple[str, int], list[EpisodeTurns]] = defaultdict(list)
    for row in episodes:
        turns = [TurnSizes(turn["fed"], turn["sampled"], turn["tool_seconds"]) for turn in row["turns"]]
        groups[row["problem_id"], row["draw"]].append(turns)
    return [*groups.values()]


def measured_speeds(
    iterations: Sequence[dict[str, Any]], episodes: Sequence[dict[str, Any]], workload: Workload
) -> Speeds:
    """The trainer's seconds per position are of batches like the recorded groups; what of them carries no loss and is
    left out of the update makes it faster.
    """
    counted = iterations[WARM_UP:]
    per_episode = [sum(costs_of_group(group, workload)) / len(group) for group in workload.groups]
    positions = sum(row["episodes"] for row in counted) * mean(per_episode)
    return Speeds(
        engine=fit_engine([turn for row in episodes for turn in row["turns"]]),
        position=sum(row["update_seconds"] for row in counted) / positions,
        refresh=median(row.get("refresh_seconds", 0.0) for row in counted),
        save=mean(row.get("save_seconds", 0.0) for row in counted),
    )


def fit_engine(turns: Sequence[dict[str, Any]]) -> EngineSpeed:
    """Of turns as `rollouts/clock.py` records them."""
    import numpy as np
    from scipy.optimize import nnls

    timed = [turn for turn in turns if turn["engine_seconds"] > 0]
    beside = [turn["live_seconds"] / turn["engine_seconds"] for turn in timed]
    terms = [
        (turn["sampled"], turn["sampled"] * live, turn["fed_meanwhile"])
        for turn, live in zip(timed, beside, strict=True)
    ]
    (step, row, fed_token), _ = nnls(np.array(terms, dtype=float), np.array([turn["engine_seconds"] for turn in timed]))
    if step + row == 0:
        raise ValueError(
            f"the {len(timed)} recorded turns show no time per token, so the engine's speed is unknown. Train more "
            f"iterations: python -m tasks train."
        )
    decode = DecodeCosts(overhead=float(step), weights=0.0, row=float(row), row_arithmetic=0.0)
    return EngineSpeed(decode, fed_token=float(fed_token))
