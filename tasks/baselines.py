"""What a world is worth without a model: policies that need none, played on a split and measured like one.

A world may name such policies in `baselines(problem)`: a name, and what is done for each user request. They say where
a model's success rate stands: the ground truth should solve everything, and a policy that only looks around shows how
much of the benchmark is won by luck. A world that names none is measured as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.environments.base import Environment, EnvironmentFault
from tasks.environments.conversation import Conversation, play_conversation
from tasks.measurement.statistics import summarise
from tasks.records import Outcome, Problem, ReferenceTurn, Trajectory

Policies = Mapping[str, Sequence[ReferenceTurn]]


def measure_baselines(
    environment: Environment, problems: Sequence[Problem], *, confidence: float
) -> dict[str, dict[str, Any]]:
    """The result of each of the world's own policies, in the form of a model's; empty where it names none."""
    own: Callable[[Problem], Policies] | None = getattr(environment, "baselines", None)
    if own is None:
        return {}
    played: dict[str, list[Trajectory]] = {}
    for problem in problems:
        for name, turns in own(problem).items():
            played.setdefault(name, []).append(play_baseline(environment, problem, name, turns))
    return {name: dict(summarise(trajectories, confidence=confidence)) for name, trajectories in played.items()}


def play_baseline(environment: Environment, problem: Problem, name: str, turns: Sequence[ReferenceTurn]) -> Trajectory:
    """One episode of one policy, started over while the environment is at fault, as a model's is."""
    calls, messages = [turn.calls for turn in turns], [turn.answer for turn in turns]
    fault: EnvironmentFault | None = None
    for attempt in range(environment.limits.max_attempts):
        try:
            played = play_conversation(environment, problem, calls, messages, stream=f"baseline/{name}/{attempt}")
        except EnvironmentFault as error:
            fault = error
        else:
            return _trajectory(problem, played)
    return _trajectory(problem, None, fault=str(fault))


def _trajectory(problem: Problem, played: Conversation | None, *, fault: str | None = None) -> Trajectory:
    """What statistics read of an episode: nobody sampled a token of it. None is an episode the environment lost."""
    replies = [reply for answered in played.replies for reply in answered] if played else []
    outcome: Outcome = "environment_error"
    if played:
        outcome = "success" if played.verdict.success else "failure"
    return Trajectory(
        problem_id=problem.id,
        category=problem.category,
        request=problem.requests[0],
        draw=0,
        sample_index=0,
        policy_version=0,
        environment_fingerprint="",
        token_ids=[],
        sampled_mask=[],
        sampler_logp=[],
        turns=[],
        outcome=outcome,
        limit=None,
        checks=played.verdict.checks if played else {},
        num_calls=len(replies),
        num_invalid_calls=sum(not reply.valid for reply in replies),
        fault=fault,
    )
