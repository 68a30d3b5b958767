"""The reward: success, plus the parts that `reward.parts` names, each times its weight.

Published ablations found success alone (no parts, the default) the most stable; the parts are here so that anybody can
compare. What a failure could earn more than a success is refused when params are read (`dominance.py`).
"""

from __future__ import annotations

import math
import sys
from typing import Any

from tasks.core.records import Problem, Score, Trajectory
from tasks.rewards.built_in import BUILT_IN
from tasks.rewards.function import function_value
from tasks.rewards.part_settings import OwnPart, PartSettings
from tasks.rewards.settings import OUTCOME, RewardSettings


def outcome_reward(problem: Problem, trajectory: Trajectory) -> Score:
    """1 for success, else 0. An episode lost to an environment fault must not be scored."""
    assert problem.id == trajectory.problem_id
    assert not trajectory.is_lost, "an environment fault says nothing about the policy"
    reward = 1.0 if trajectory.is_success else 0.0
    return Score(reward=reward, parts={OUTCOME: reward}, weights={OUTCOME: 1.0})


def reward(problem: Problem, trajectory: Trajectory, settings: RewardSettings) -> Score:
    """outcome + Σ weight · value over the parts. ValueError in one line where a part cannot be computed.

    An episode lost to an environment fault must not be scored. Source: Bespoke Labs, "Improving multi-turn tool use
    with reinforcement learning" (2025-04).
    """
    score = outcome_reward(problem, trajectory)
    values = {part.name: part_value(part, problem, trajectory) for part in settings.parts}
    weights = {part.name: part.weight for part in settings.parts}
    parts = score.parts | {name: weights[name] * value for name, value in values.items()}
    return Score(reward=math.fsum(parts.values()), parts=parts, weights=score.weights | weights)


def part_value(part: PartSettings, problem: Problem, trajectory: Trajectory) -> float:
    """Before the weight."""
    if isinstance(part, OwnPart):
        return function_value(part.name, part.function, problem, trajectory)
    return BUILT_IN[part.name].value(problem, trajectory, part)


def check_score(score: Any, *, problem: Problem, trajectory: Trajectory) -> Score:
    """ValueError unless all numbers are finite: one NaN would spread to the group's advantages and the weights."""
    where = (
        f"the reward of problem {problem.id!r} "
        f"(draw {trajectory.draw}, sample {trajectory.sample_index}; the episode ended in {trajectory.outcome})"
    )
    remedy = "Make it return a Score of finite floats; call it on the stored trajectory to find the cause."
    if not isinstance(score, Score):
        raise ValueError(
            f"{where}: returned {score!r}, which is not a Score, so there is nothing to learn from. {remedy}"
        )
    for name, value in {"reward": score.reward, **score.parts}.items():
        if not _is_finite_number(value):
            what = "its reward" if name == "reward" else f"its part {name!r}"
            raise ValueError(
                f"{where}: {what} is {value!r}, which is not a finite number, and one such value spoils the whole "
                f"group's advantages and then the weights. {remedy}"
            )
    return score


def _is_finite_number(value: Any) -> bool:
    """Whether a float can represent it. Not a bool: probably a forgotten weight."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
