"""Scripted baselines: an environment's policies without a model (`baselines(problem)`), measured like a model.

They put a success rate in context: the ground truth should solve everything, and a policy that only looks around shows
how much is luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.records import Outcome, Problem, ReferenceTurn, Trajectory
from tasks.measurement.statistics import summarise
from tasks.tools.base import Environment, EnvironmentFault
from tasks.tools.replay import Played, Script, play

Policies = Mapping[str, Sequence[ReferenceTurn]]


def measure_baselines(
    environment: Environment, problems: Sequence[Problem], *, confidence: float
) -> dict[str, dict[str, Any]]:
    """The result of each scripted baseline, in the form of a model's; empty where the environment names none."""
    scripts: dict[str, list[Script]] = {}
    for problem in problems:
        for name, turns in environment.baselines(problem).items():
            scripts.setdefault(name, []).append(Script.of(problem, turns))
    played = {name: map(_trajectory, scripts[name], play(environment, scripts[name])) for name in scripts}
    return {name: dict(summarise(list(trajectories), confidence=confidence)) for name, trajectories in played.items()}


def _trajectory(script: Script, played: Played) -> Trajectory:
    """The fields that statistics read; nothing was sampled."""
    outcome: Outcome = "environment_error"
    if played.verdict is not None:
        outcome = "success" if played.verdict.success else "failure"
    elif not isinstance(played.error, EnvironmentFault):
        assert played.error is not None
        raise played.error
    return Trajectory(
        problem_id=script.problem.id,
        category=script.problem.category,
        request=script.problem.requests[0],
        draw=0,
        sample_index=0,
        policy_version=0,
        environment_fingerprint="",
        sequences=[],
        turns=[],
        outcome=outcome,
        limit=None,
        checks=played.verdict.checks if played.verdict else {},
        num_calls=len(played.replies),
        num_invalid_calls=sum(not reply.valid for reply in played.replies),
        fault=str(played.error) if played.error else None,
        split_group=script.problem.split_group,
    )
