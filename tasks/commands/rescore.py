"""The command `rescore`: stored trajectories under today's `reward`; no model, environment or judge is asked.

Writes the trajectories with their new scores to a new file, and prints what changed: totals, parts, and what GRPO reads
of them, the order and the sign of advantages within a group (the episodes of one problem in one draw).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from tasks.core.files import write_jsonl
from tasks.core.records import EQUAL_REWARDS, Score, Trajectory
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.text import counted
from tasks.core.workspace import as_shell_sees
from tasks.rewards.stored import Rescorer, read_trajectories
from tasks.stages.train.settings import TrainSections

Pair = tuple[float, float]  # the reward before and now


@dataclass(slots=True)
class Changes:
    """What a file's scores were and are."""

    old: list[Score] = field(default_factory=list)
    new: list[Score] = field(default_factory=list)
    groups: dict[tuple[str, int], list[Pair]] = field(default_factory=lambda: defaultdict(list))
    best_failures: dict[tuple[str, int], float] = field(default_factory=dict)
    worst_successes: dict[tuple[str, int], float] = field(default_factory=dict)
    num_unscored: int = 0
    num_without_reward: int = 0

    def add(self, trajectory: Trajectory, new: Score) -> None:
        old = trajectory.score or _success_alone(trajectory)
        self.num_without_reward += trajectory.score is None
        key = (trajectory.problem_id, trajectory.draw)
        self.old.append(old)
        self.new.append(new)
        self.groups[key].append((old.reward, new.reward))
        if trajectory.is_success:
            self.worst_successes[key] = min(new.reward, self.worst_successes.get(key, new.reward))
        else:
            self.best_failures[key] = max(new.reward, self.best_failures.get(key, new.reward))

    @property
    def num_failures_above(self) -> int:
        """Groups in which a failure earns as much as a success."""
        shared = self.best_failures.keys() & self.worst_successes.keys()
        return sum(self.worst_successes[key] - self.best_failures[key] <= EQUAL_REWARDS for key in shared)


def rescore(file: Path, out: Path | None) -> list[str]:
    """Score the trajectories of `file` again into `out` (None: artifacts/rescore/); returns the lines to print.

    ValueError if `out` exists, if a part cannot be computed, or if no trajectory is of this project's problems.
    """
    params = read_params()
    settings, paths = load(TrainSections, params), load_paths(params)
    out = out or paths.artifacts / "rescore" / file.name
    _refuse_to_overwrite(file, out)
    changes = Changes()
    write_jsonl(out, _rescored_rows(file, Rescorer(paths, settings.reward), changes, paths))
    return [
        *table(changes),
        "",
        f"{as_shell_sees(out)}: {counted(len(changes.new), 'trajectory', 'trajectories')} with their scores",
    ]


def _refuse_to_overwrite(file: Path, out: Path) -> None:
    if not file.is_file():
        raise ValueError(
            f"{file}: is no file, so there is nothing to score. Name stored trajectories, such as "
            f"artifacts/evaluate/trajectories/test_best.jsonl."
        )
    if out.exists():
        raise ValueError(
            f"{out}: exists, and scores that something was decided by are never written over. Name another file with "
            f"--out."
        )


def _rescored_rows(file: Path, rescorer: Rescorer, changes: Changes, paths: Paths) -> Iterator[dict[str, Any]]:
    for _, trajectory in read_trajectories(file):
        score = rescorer.score(trajectory)
        if score is None:
            changes.num_unscored += 1
        else:
            changes.add(trajectory, score)
            trajectory.score = score
        yield trajectory.to_row()
    if not changes.new:
        raise ValueError(
            f"{file}: no trajectory is an episode of the problems in {paths.stage('curate')}, so none can be scored "
            f"again. Name trajectories of this project, or run `python -m tasks curate` with the problems they are of."
        )


def _success_alone(trajectory: Trajectory) -> Score:
    """What a row without a score was last worth: evaluation reads success alone."""
    value = float(trajectory.is_success)
    return Score(value, {"outcome": value}, {"outcome": 1.0})


def table(changes: Changes) -> list[str]:
    """Means per trajectory before and now, then what changed within the groups."""
    names = list(dict.fromkeys(name for score in [*changes.old, *changes.new] for name in score.parts))
    lines = [f"{'mean per trajectory':<26}{'before':>10}{'now':>10}"]
    lines.append(_row("total", [s.reward for s in changes.old], [s.reward for s in changes.new]))
    for name in names:
        old, new = (
            [score.parts[name] for score in scores if name in score.parts] for scores in (changes.old, changes.new)
        )
        lines.append(_row(f"  {name}", old, new))
    pairs = [pair for group in changes.groups.values() for pair in combinations(group, 2)]
    advantages = [(_signs(group, 0), _signs(group, 1)) for group in changes.groups.values()]
    num_flips = sum(a != b for old, new in advantages for a, b in zip(old, new, strict=True))
    num_swapped = sum(_order(first, second, 0) * _order(first, second, 1) < 0 for first, second in pairs)
    num_split = sum(_order(a, b, 0) == 0 != _order(a, b, 1) for a, b in pairs)
    signal = [sum(any(signs[which]) for signs in advantages) for which in (0, 1)]
    return [
        *lines,
        "",
        f"{num_swapped:,} of {counted(len(pairs), 'pair')} of a group changed their order, and {num_split:,} "
        f"that were equal differ",
        f"{num_flips:,} of {len(changes.new):,} advantages changed their sign",
        f"{signal[0]:,} of {counted(len(advantages), 'group')} had a signal, {signal[1]:,} have one now",
        f"a failure earns as much as a success in {counted(changes.num_failures_above, 'group')}",
        *_notes(changes),
    ]


def _row(name: str, *columns: Sequence[float]) -> str:
    """The mean of each column; a dash where nobody measured it."""
    return f"{name:<26}" + "".join(f"{fmean(values):>10.4f}" if values else f"{'–':>10}" for values in columns)


def _notes(changes: Changes) -> Iterator[str]:
    if changes.num_without_reward:
        told = counted(changes.num_without_reward, "trajectory was", "trajectories were")
        yield f"{told} stored without a reward: before is success alone"
    if changes.num_unscored:
        yield f"{counted(changes.num_unscored, 'trajectory', 'trajectories')} cannot be scored: unchanged"


def _order(first: Pair, second: Pair, which: int) -> int:
    return _sign(first[which] - second[which])


def _signs(group: Sequence[Pair], which: int) -> list[int]:
    """Of each advantage r − mean(r)."""
    mean = fmean(pair[which] for pair in group)
    return [_sign(pair[which] - mean) for pair in group]


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= EQUAL_REWARDS else 1 if difference > 0 else -1
