"""How often the policy solves each problem: a Beta posterior per problem, from the baseline and the training rollouts.

Most problems of a large split are played once or never, so a problem borrows from its like. A tree of four floors (all
problems, a level, a category of that level, the problem) has counts on each; the rate of a node is

    rate = (solved + k · rate of its parent) / (played + k)          k = `prior_strength`, in episodes

with ½ above the root, and the posterior of a problem is Beta(k·rate + solved, k·(1 − rate) + failed), with the rate of
its category. A problem's own episodes are also in its category's counts; where a category has one problem they count
twice. The policy moves, so all counts halve every `half_life` iterations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.records import Problem
from tasks.learning.shared.settings import BandSettings, Difficulty

FIGURE = re.compile(
    r"""\d{4}-\d\d-\d\d                           # a date
    | \d{1,2}:\d\d(?::\d\d)?                     # a time
    | \d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w)         # a number whose thousands have commas
    | (?!T\d\d?:)\w*\d\w*(?:\.\d+)*              # any other, or a code that has one; not the time after a date's T
    """,
    re.VERBOSE,
)
UNKNOWN_RATE = 0.5  # above the root: nothing was played


@dataclass(frozen=True, slots=True)
class Beta:
    """A posterior of a solve rate: as if `solved` and `failed` episodes had been seen, fractions included."""

    solved: float
    failed: float

    @property
    def mean(self) -> float:
        return self.solved / (self.solved + self.failed)


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes of one problem, which may be of another split."""

    problem: Problem
    solved: int
    episodes: int


class SolveRates:
    """Counts by node; `difficulty` says what a level is."""

    def __init__(self, problems: Iterable[Problem], settings: BandSettings):
        self.strength, self.half_life = settings.prior_strength, settings.half_life
        self.difficulty: Difficulty = "level" if settings.levels is None else settings.levels.by
        self.paths = {problem.id: self._path(problem) for problem in problems}
        self.counts: dict[str, list[float]] = {}
        self.iteration = 0

    def add_all(self, played: Iterable[Played]) -> None:
        for item in played:
            for node in self._path(item.problem):
                counts = self.counts.setdefault(node, [0.0, 0.0])
                counts[0] += item.solved
                counts[1] += item.episodes

    def forget(self, iteration: int) -> None:
        """Let the counts fade up to this iteration."""
        kept = 1.0 if self.half_life is None else 0.5 ** ((iteration - self.iteration) / self.half_life)
        self.iteration = iteration
        if kept < 1:
            self.counts = {node: [solved * kept, played * kept] for node, (solved, played) in self.counts.items()}

    def posteriors(self) -> dict[str, Beta]:
        """Of every problem, by id."""
        rates: dict[str, float] = {}
        return {name: self._posterior(path, rates) for name, path in self.paths.items()}

    def level_rate(self, level: int, posteriors: Mapping[str, Beta]) -> Beta | None:
        """Of a level: the mean over its problems, drawn often or not, as sure as the episodes of the level; None
        where it has none, since a level is not known by what it borrows.
        """
        _, num_played = self.counts.get(_level_node(level), (0.0, 0.0))
        means = [posteriors[name].mean for name, path in self.paths.items() if path[1] == _level_node(level)]
        mean = sum(means) / len(means)
        return Beta(num_played * mean, num_played * (1 - mean)) if num_played else None

    def state(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "counts": {node: list(counts) for node, counts in self.counts.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.iteration = state["iteration"]
        self.counts = {node: list(counts) for node, counts in state["counts"].items()}

    def _path(self, problem: Problem) -> tuple[str, ...]:
        level = _level_node(difficulty(problem, self.difficulty))
        return "all", level, f"{level}/{problem.category}", f"problem {problem.id}"

    def _posterior(self, path: Sequence[str], rates: dict[str, float]) -> Beta:
        """`rates`: of the nodes above problems that were computed already."""
        rate = UNKNOWN_RATE
        for node in path[:-1]:
            if node not in rates:
                solved, played = self.counts.get(node, (0.0, 0.0))
                rates[node] = (solved + self.strength * rate) / (played + self.strength)
            rate = rates[node]
        solved, played = self.counts.get(path[-1], (0.0, 0.0))
        return Beta(self.strength * rate + solved, self.strength * (1 - rate) + played - solved)


def probabilities_between(rates: Sequence[Beta], low: float, high: float) -> list[float]:
    """The posterior probability of each rate to be between the two."""
    from scipy.special import betainc

    solved, failed = [rate.solved for rate in rates], [rate.failed for rate in rates]
    found: list[float] = (betainc(solved, failed, high) - betainc(solved, failed, low)).clip(0).tolist()
    return found


def difficulty(problem: Problem, by: Difficulty) -> int:
    """The problem's own level, the calls of its reference (its horizon), how many different tools these name, or its
    strictness: how many different values a solution must get right, those of the arguments and the figures it answers.
    """
    calls = [call for turn in problem.reference for call in turn.calls]
    if by == "strictness":
        arguments = {value for call in calls for value in _leaves(call.arguments)}
        in_arguments = {_plain(value) if FIGURE.fullmatch(value) else value for value in arguments}
        told = {figure for turn in problem.reference for figure in _figures(turn.answer)}
        return len(in_arguments) + len(told.difference(in_arguments, *map(_figures, arguments)))
    return {"level": problem.level, "calls": len(calls), "tools": len({call.name for call in calls})}[by]


def _leaves(value: Any) -> Iterator[str]:
    """The values of a JSON document, as text."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield str(value)


def _figures(text: str) -> list[str]:
    return [_plain(figure) for figure in FIGURE.findall(text)]


def _plain(figure: str) -> str:
    """One text for one number: 1234.5 for 1,234.50."""
    bare = figure.replace(",", "")
    return bare.rstrip("0").rstrip(".") if "." in bare else bare


def _level_node(level: int) -> str:
    return f"level {level}"
