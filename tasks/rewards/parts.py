"""The reward: success, plus optional parts for format, execution and a function of the user's.

Published ablations found success alone (all weights 0, the default) the most stable; the parts are here so that
anybody can compare. Success must dominate: weights that let a well-formed failure earn as much are refused. Left out:
step penalties and progress shaping.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from tasks.core.records import Problem, Score, Trajectory, Turn
from tasks.rewards.function import function_value
from tasks.rewards.settings import RewardSettings


def outcome_reward(problem: Problem, trajectory: Trajectory) -> Score:
    """1 for success, else 0. An episode lost to an environment fault must not be scored."""
    assert problem.id == trajectory.problem_id
    assert trajectory.outcome != "environment_error", "an environment fault says nothing about the policy"
    reward = 1.0 if trajectory.is_success else 0.0
    return Score(reward=reward, parts={"outcome": reward})


def reward(problem: Problem, trajectory: Trajectory, settings: RewardSettings) -> Score:
    """outcome + format_weight · well-formed turns / turns + execution_weight · valid calls / calls + function_weight ·
    the function's value; 0 ≤ reward < 2.

    A part with weight 0 is not on the Score. An episode lost to an environment fault must not be scored. Source:
    Bespoke Labs, "Improving multi-turn tool use with reinforcement learning" (2025-04).
    """
    parts = dict(outcome_reward(problem, trajectory).parts)
    if settings.format_weight > 0:
        parts["format"] = settings.format_weight * well_formed_share(trajectory.turns)
    if settings.execution_weight > 0:
        parts["execution"] = settings.execution_weight * valid_call_share(trajectory)
    if settings.function is not None:
        parts["function"] = settings.function_weight * function_value(settings.function, problem, trajectory)
    return Score(reward=math.fsum(parts.values()), parts=parts)


def well_formed_share(turns: list[Turn]) -> float:
    """Share of turns that ended normally and contain no malformed call; 0 without turns."""
    well_formed = [
        turn.stop_reason in ("end_of_turn", "stop_string") and not any(call.get("malformed") for call in turn.calls)
        for turn in turns
    ]
    return sum(well_formed) / len(turns) if turns else 0.0


def valid_call_share(trajectory: Trajectory) -> float:
    """Share of calls that were carried out; malformed ones count as calls.

    0 without calls: with 1, never calling a tool would earn the whole part. Source: verifiers' ToolRubric.
    """
    return 1 - trajectory.num_invalid_calls / trajectory.num_calls if trajectory.num_calls else 0.0


def check_score(score: Any, *, reward_name: str, problem: Problem, trajectory: Trajectory) -> Score:
    """ValueError unless all numbers are finite: one NaN would spread to the group's advantages and the weights."""
    where = (
        f"reward {reward_name!r} of problem {problem.id!r} "
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
