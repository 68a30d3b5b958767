"""From the records of a run, artifacts/timings: its episodes, and how fast its engine and trainer were.

The engine's speed is a least-squares fit with non-negative terms over its replies: seconds = step · steps + row · steps
· live turns + fed_token · tokens fed + turn · turns begun + read · moments at which some began. What the process does
for a turn between the engine's polls is measured apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from tasks.core.files import read_jsonl
from tasks.planning.seconds import DecodeCosts
from tasks.planning.simulation.workload import EngineSpeed, EpisodeTurns, Speeds, TurnSizes, Workload, costs_of_group

Row = dict[str, Any]
Groups = Sequence[Sequence[EpisodeTurns]]
FEWEST_EPISODES, FEWEST_ITERATIONS = 8, 3
FIELDS = {
    "train": ("iteration", "episodes", "update_seconds", "iteration_seconds"),
    "turns": ("problem_id", "draw", "turns"),
    "engine": ("seconds", "steps", "live_seconds", "fed", "begun", "reads", "host_seconds", "host_turns"),
}
WARM_UP = 1  # iterations that are left out: the first loads what later ones find loaded
SLOWED_BESIDE = 0.46  # threads of trainer and engine in one process, on 2 cores (infra/benchmarks.md, Simulated GPUs)
NO_SPEED = (0.0,) * 5


@dataclass(frozen=True, slots=True)
class Records:
    """What a run left in artifacts/timings, by the names of the files."""

    train: Sequence[Row]
    turns: Sequence[Row]
    engine: Sequence[Row]


def read_records(folder: Path) -> Records:
    """Rows per iteration, per episode and per reply; ValueError where no run left them, or too few."""
    paths = {name: folder / f"{name}.jsonl" for name in FIELDS}
    missing = next((path for path in paths.values() if not path.exists()), None)
    if missing is not None:
        raise ValueError(
            f"{missing} is not there, so there are no turns, tokens and seconds to simulate from. Train a few "
            f"iterations first: python -m tasks train."
        )
    found = {name: [row for _, row in read_jsonl(path)] for name, path in paths.items()}
    if len(found["train"]) < FEWEST_ITERATIONS or len(found["turns"]) < FEWEST_EPISODES:
        raise ValueError(
            f"{folder} has {len(found['train'])} iterations and {len(found['turns'])} episodes, too few to draw from. "
            f"Train at least {FEWEST_ITERATIONS} iterations with {FEWEST_EPISODES} episodes: set train.num_iterations."
        )
    for name, rows in found.items():
        if lacks := next((field for row in rows for field in FIELDS[name] if field not in row), None):
            raise ValueError(
                f"{paths[name]}: a row has no {lacks}, so it is damaged or another version's. Train again: "
                f"python -m tasks train."
            )
    return Records(**found)


def recorded_groups(episodes: Sequence[Row]) -> list[list[EpisodeTurns]]:
    groups: dict[tuple[str, int], list[EpisodeTurns]] = defaultdict(list)
    for row in episodes:
        turns = [TurnSizes(turn["fed"], turn["sampled"], turn["tool_seconds"]) for turn in row["turns"]]
        groups[row["problem_id"], row["draw"]].append(turns)
    return [*groups.values()]


def scale_groups(groups: Groups, tokens: tuple[int, int, int]) -> Groups:
    """Episodes as unequal as these whose means are `tokens` of prompt, sampled and of replies."""
    found = mean_tokens(groups)
    prompt, sampled, replies = (wanted / max(1.0, mean) for wanted, mean in zip(tokens, found, strict=True))

    def scale(turn: TurnSizes, fed: float) -> TurnSizes:
        return replace(turn, fed=round(turn.fed * fed), sampled=max(1, round(turn.sampled * sampled)))

    return [
        [[scale(turn, replies if number else prompt) for number, turn in enumerate(episode)] for episode in group]
        for group in groups
    ]


def mean_tokens(groups: Groups) -> tuple[float, float, float]:
    """Of an episode: its prompt, what is sampled, what tools reply."""
    episodes = [episode for group in groups for episode in group]
    return (
        mean(episode[0].fed for episode in episodes),
        mean(sum(turn.sampled for turn in episode) for episode in episodes),
        mean(sum(turn.fed for turn in episode[1:]) for episode in episodes),
    )


def measured_speeds(records: Records, workload: Workload, *, in_process: bool) -> Speeds:
    """The trainer's seconds per position are of batches like the recorded groups; what of them carries no loss and is
    left out of the update makes it faster. `in_process`: the engine is in the process that plays and trains.
    """
    counted, replies = records.train[WARM_UP:], records.engine
    per_episode = [sum(costs_of_group(group, workload)) / len(group) for group in workload.groups]
    positions = sum(row["episodes"] for row in counted) * mean(per_episode)
    is_ahead = any("wait_seconds" in row for row in counted)  # its updates were slowed as they were measured
    return Speeds(
        engine=fit_engine(replies, in_process=in_process),
        position=sum(row["update_seconds"] for row in counted) / positions,
        refresh=median(row.get("refresh_seconds", 0.0) for row in counted),
        save=mean(row.get("save_seconds", 0.0) for row in counted),
        host_turn=sum(row["host_seconds"] for row in replies) / max(1, sum(row["host_turns"] for row in replies)),
        slowed_beside=SLOWED_BESIDE if in_process and not is_ahead else 0.0,
    )


def fit_engine(replies: Sequence[Row], *, in_process: bool) -> EngineSpeed:
    """Of rows as `rollouts/engine_clock.py` records them."""
    import numpy as np
    from scipy.optimize import nnls

    timed = [row for row in replies if row["seconds"] > 0 and row["steps"] > 0]
    terms = [
        (row["steps"], row["steps"] * row["live_seconds"] / row["seconds"], row["fed"], row["begun"], row["reads"])
        for row in timed
    ]
    seconds = np.array([row["seconds"] for row in timed])
    (step, live, fed_token, turn, read), _ = nnls(np.array(terms, dtype=float), seconds) if timed else (NO_SPEED, 0.0)
    if step + live == 0:
        raise ValueError(
            f"the {len(timed)} recorded replies show no time per token, so the engine's speed is unknown. Train more "
            f"iterations: python -m tasks train."
        )
    decode = DecodeCosts(overhead=float(step), weights=0.0, row=float(live), row_arithmetic=0.0)
    return EngineSpeed(decode, float(fed_token), float(turn), float(read), in_process=in_process)
