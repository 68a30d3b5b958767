"""A reward function of the user's: `module:function` in tasks/custom/, a pure function of (problem, trajectory).

    def score(problem: Problem, trajectory: Trajectory) -> float   # from 0 to 1

It is trusted. Whatever else it returns stops the run: a reward that was guessed would be learnt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tasks.core.load_object import load_object
from tasks.core.records import Problem, Trajectory
from tasks.core.text import one_line


def load_function(path: str) -> Callable[[Problem, Trajectory], Any]:
    """ValueError in one line if `path` names no plain function in tasks.custom."""
    found = load_object(path)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(
            f"{path} is no plain function, so no episode could be scored. Define it as "
            f"{path.rpartition(':')[2]}(problem, trajectory) -> float (tasks/custom/README.md has an example)"
        )
    return found


def function_value(name: str, path: str, problem: Problem, trajectory: Trajectory) -> float:
    """What the function of the part `name` returns, from 0 to 1. ValueError in one line if it raises or returns
    anything else.
    """
    function = load_function(path)
    where = f"reward.parts: {name} ({path}) on problem {problem.id!r} (the episode ended in {trajectory.outcome})"
    try:
        value = function(problem, trajectory)
    except (Exception, SystemExit) as error:  # a user's function may do anything
        raise ValueError(
            f"{where}: it raised {type(error).__name__}: {one_line(error)}, so the episode has no reward. Correct the "
            f"function, or take the part out of reward.parts."
        ) from error
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:  # NaN is not either
        raise ValueError(
            f"{where}: it returned {one_line(repr(value), 100)}, which is not a number from 0 to 1, so it could "
            f"outweigh success or spoil the weights. Return a float from 0 to 1; float(value) makes one of True."
        )
    return float(value)
