"""The default reward: correctness alone. 1 for a success, 0 for anything else.

Published ablations on multi-turn tool use found it the most stable: parts for format and for executed calls teach the
policy to collect the parts.
"""

from __future__ import annotations

from tasks.core.records import Problem, Score, Trajectory


def outcome_reward(problem: Problem, trajectory: Trajectory) -> Score:
    """A pure function of what happened; an episode lost to a fault of the environment must not be scored."""
    assert problem.id == trajectory.problem_id
    assert trajectory.outcome != "environment_error", "a fault of ours is not evidence about the policy"
    reward = 1.0 if trajectory.is_success else 0.0
    return Score(reward=reward, parts={"outcome": reward})
