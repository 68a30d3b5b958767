"""Correctness with parts for format and execution added, and the check that no reward is nonsense.

Why it exists: published ablations found correctness alone (both weights 0, the default) the most stable, and a claim
like that should be one anybody can try again. The outcome must dominate, so weights that would let a tidy failure earn
as much as a success are refused. Left out: step penalties and progress shaping, which nothing here compares.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from tasks.core.records import Problem, Score, Trajectory, Turn
from tasks.rewards.settings import RewardSettings


def outcome_reward(problem: Problem, trajectory: Trajectory) -> Score:
    """1 for a success, 0 for anything else; an episode lost to an environment fault must not be scored."""
    assert problem.id == trajectory.problem_id
    assert trajectory.outcome != "environment_error", "a fault of ours is not evidence about the policy"
    reward = 1.0 if trajectory.is_success else 0.0
    return Score(reward=reward, parts={"outcome": reward})


def reward(problem: Problem, trajectory: Trajectory, settings: RewardSettings) -> Score:
    """outcome + format_weight · well-formed turns / turns + execution_weight · valid calls / calls; 0 ≤ reward < 2.

    A pure function of what happened. A part whose weight is 0 is not on the Score, so with both at 0 this is
    `outcome_reward`. An episode lost to a fault of the environment must not be scored.
    Source: the parts compared in Bespoke Labs, "Improving multi-turn tool use with reinforcement learning" (2025-04).
    """
    parts = dict(outcome_reward(problem, trajectory).parts)
    if settings.format_weight > 0:
        parts["format"] = settings.format_weight * well_formed_share(trajectory.turns)
    if settings.execution_weight > 0:
        parts["execution"] = settings.execution_weight * valid_call_share(trajectory)
    return Score(reward=math.fsum(parts.values()), parts=parts)


def well_formed_share(turns: list[Turn]) -> float:
    """Share of assistant turns that ended by themselves and hold no malformed call; 0 where there is no turn."""
    well_formed = [
        turn.stop_reason in ("end_of_turn", "stop_string") and not any(call.get("malformed") for call in turn.calls)
        for turn in turns
    ]
    return sum(well_formed) / len(turns) if turns else 0.0


def valid_call_share(trajectory: Trajectory) -> float:
    """Share of calls the environment could carry out; malformed ones count as calls.

    0 where nothing was called: were it 1, the surest way to the whole part would be never to call a tool.
    Source: verifiers' ToolRubric, the parts' origin, counts it so too.
    """
    return 1 - trajectory.num_invalid_calls / trajectory.num_calls if trajectory.num_calls else 0.0


def check_score(score: Any, *, reward_name: str, problem: Problem, trajectory: Trajectory) -> Score:
    """The score as it came, if its reward and every part are finite numbers; ValueError otherwise.

    One NaN would turn the advantages of its whole group, and with the next step the weights, into NaN.
    """
    where = (
        f"reward {reward_name!r} of problem {problem.id!r} "
        f"(draw {trajectory.draw}, sample {trajectory.sample_index}; the episode ended in {trajectory.outcome})"
    )
    remedy = "Make it return a Score of finite floats; call it on the stored trajectory to see why it does not."
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
    """Whether a float can hold it. A bool is refused too: most likely a comparison somebody forgot to weigh."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
