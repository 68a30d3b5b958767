"""What an environment of a package's own problems is written with: a draw of them, and what is made once for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tasks.core.records import Problem

Scene = TypeVar("Scene")


def draw_problems(
    rows: Sequence[Problem], *, seed: int, num_problems: int, max_level: int, level_counts: str
) -> tuple[list[Problem], dict[str, list[str]]]:
    """(a random sample of those up to a level, in order; the ids of the others by reason)."""
    fit = [row.id for row in rows if row.level <= max_level]
    kept = set(random.Random(seed).sample(fit, min(num_problems, len(fit))))
    left_out = {
        f"more than {max_level} {level_counts} (curate.max_level)": [row.id for row in rows if row.level > max_level],
        f"not among the {num_problems} drawn (curate.num_generated)": [id for id in fit if id not in kept],
    }
    return [row for row in rows if row.id in kept], left_out


class Scenes(Generic[Scene]):
    """What the episodes of a problem begin with, made once; again where its `world` is another."""

    def __init__(self, make: Callable[[Problem], Scene]):
        self._make = make
        self._made: dict[str, tuple[Mapping[str, Any], Scene]] = {}

    def of(self, problem: Problem) -> Scene:
        made = self._made.get(problem.id)
        if made is None or (made[0] is not problem.world and made[0] != problem.world):
            made = self._made[problem.id] = (problem.world, self._make(problem))
        return made[1]
