"""The built-in parts of a reward, by name: one small pure function each, with the bounds of its value.

A value is a share from 0 to 1, or a penalty from 0 down. Bounds are those of one episode within its limits, from which
`dominance.py` computes whether a failure could outscore a success. A part must be computable from a stored trajectory:
what a judge or an environment knows is left in the verdict's details. Turns and calls are the policy's own: what a
replayed start gave it (`learning/grpo/prefixes.py`) earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tasks.core.records import Problem, Trajectory, Turn
from tasks.rewards.left_details import judged_share, left_details
from tasks.rewards.limits import UNIT, Bounds, EpisodeLimits
from tasks.rewards.part_settings import BuiltInPart, RankedPart
from tasks.rewards.retrieval import ndcg, recall


@dataclass(frozen=True, slots=True)
class Part:
    """`value(problem, trajectory, settings)`, and its `bounds` under an episode's limits. `settings` is the class of
    its entry in `reward.parts`.
    """

    value: Callable[[Problem, Trajectory, BuiltInPart], float]
    bounds: Callable[[EpisodeLimits], Bounds]
    settings: type[BuiltInPart] = BuiltInPart


class NotCounted(ValueError):
    """The endpoint that played an episode reported no usage, so nobody knows how many tokens it wrote."""


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


def passed_share(trajectory: Trajectory) -> float:
    """Share of the verdict's checks that hold; 1 for a success, 0 for a failure without checks."""
    if trajectory.is_success:
        return 1.0
    return sum(trajectory.checks.values()) / len(trajectory.checks) if trajectory.checks else 0.0


def sampled_thousands(trajectory: Trajectory) -> float:
    """Thousands of tokens that the policy wrote; from the usage where an endpoint gives no token ids. NotCounted where
    it gives none either.
    """
    if trajectory.sequences:
        return trajectory.num_sampled_tokens / 1000
    num_tokens: int | None = left_details(trajectory, "usage", ("output_tokens",))["output_tokens"]
    if num_tokens is None:
        raise NotCounted(
            f"problem {trajectory.problem_id!r}: the endpoint counted no tokens, so token_cost cannot be computed. "
            f"Take it out of reward.parts, or use an endpoint that reports usage."
        )
    return num_tokens / 1000


def _ranked(metric: Callable[[Trajectory, int], float]) -> Part:
    def value(problem: Problem, trajectory: Trajectory, settings: BuiltInPart) -> float:
        assert isinstance(settings, RankedPart)
        return metric(trajectory, settings.k)

    return Part(value, lambda limits: UNIT, RankedPart)


def _share(value: Callable[[Trajectory], float]) -> Part:
    return Part(lambda problem, trajectory, settings: value(trajectory), lambda limits: UNIT)


def _penalty(count: Callable[[Trajectory], float], most: Callable[[EpisodeLimits], float]) -> Part:
    def bounds(limits: EpisodeLimits) -> Bounds:
        return Bounds(-most(limits), 0.0, -most(limits), 0.0)

    return Part(lambda problem, trajectory, settings: -count(trajectory), bounds)


BUILT_IN: dict[str, Part] = {
    "step_penalty": _penalty(lambda trajectory: len(trajectory.own_turns), lambda limits: limits.max_turns),
    "invalid_call_penalty": _penalty(lambda trajectory: trajectory.num_invalid_calls, lambda limits: limits.max_calls),
    "token_cost": _penalty(sampled_thousands, lambda limits: limits.max_sampled_tokens / 1000),
    "call_validity": _share(valid_call_share),
    "format": _share(lambda trajectory: well_formed_share(trajectory.own_turns)),
    "progress": Part(
        lambda problem, trajectory, settings: passed_share(trajectory), lambda limits: Bounds(0.0, 1.0, 1.0, 1.0)
    ),
    "ndcg": _ranked(ndcg),
    "recall": _ranked(recall),
    "judge": _share(lambda trajectory: judged_share(trajectory, "score")),
    "soundness": _share(lambda trajectory: judged_share(trajectory, "soundness")),
}
