"""The dominance check: whether every success outscores every failure, whatever the parts add.

A success earns 1 for its outcome and a failure 0. The parts' bounds under the episode limits say the most that a
failure can earn besides and the least that a success can; their difference must stay below that gap of 1. The bounds of
the parts are added one by one, so the check may refuse what no single episode reaches, and never accepts what one does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

from tasks.core.records import EQUAL_REWARDS
from tasks.rewards.built_in import BUILT_IN
from tasks.rewards.limits import UNIT, Bounds, EpisodeLimits
from tasks.rewards.part_settings import OwnPart, PartSettings
from tasks.rewards.settings import RewardSettings

OUTCOME_GAP = 1.0  # reward of a success minus a failure, without parts


def part_bounds(part: PartSettings, limits: EpisodeLimits) -> Bounds:
    """Bounds of the part's value, before its weight."""
    return UNIT if isinstance(part, OwnPart) else BUILT_IN[part.name].bounds(limits)


def reward_bounds(settings: RewardSettings, limits: EpisodeLimits) -> Bounds:
    """Bounds of the whole reward, with the outcome."""

    def total(of: Callable[[Bounds], float]) -> float:
        return fsum(part.weight * of(part_bounds(part, limits)) for part in settings.parts)

    return Bounds(
        total(lambda bounds: bounds.failure_least),
        total(lambda bounds: bounds.failure_most),
        OUTCOME_GAP + total(lambda bounds: bounds.success_least),
        OUTCOME_GAP + total(lambda bounds: bounds.success_most),
    )


def outcome_dominates(settings: RewardSettings, limits: EpisodeLimits) -> bool:
    """Whether the worst success outscores the best failure, by more than counts as equal in advantages."""
    bounds = reward_bounds(settings, limits)
    return bounds.success_least - bounds.failure_most > EQUAL_REWARDS


def arithmetic(settings: RewardSettings, limits: EpisodeLimits) -> str:
    """The best failure and the worst success, each as a sum over the parts that move it."""
    bounds = reward_bounds(settings, limits)
    return (
        f"the best failure can earn {bounds.failure_most:g} = {_sum(settings, limits, 0.0)}, and the worst success "
        f"{bounds.success_least:g} = {_sum(settings, limits, OUTCOME_GAP)}"
    )


def _sum(settings: RewardSettings, limits: EpisodeLimits, outcome: float) -> str:
    terms = [f"{outcome:g}"]
    for part in settings.parts:
        bounds = part_bounds(part, limits)
        value = bounds.success_least if outcome else bounds.failure_most
        if value:
            terms.append(f"{'-' if value < 0 else '+'} {part.weight:g} × {abs(value):g} ({part.name})")
    return " ".join(terms)


def check_dominance(settings: RewardSettings, limits: EpisodeLimits) -> None:
    """ValueError with the arithmetic in one line, unless every success outscores every failure or it is insisted on."""
    if settings.allow_undominated or outcome_dominates(settings, limits):
        return
    raise ValueError(
        f"reward.parts: {arithmetic(settings, limits)}, within {limits.max_turns:,} turns, {limits.max_calls:,} calls "
        f"and {limits.max_sampled_tokens:,} sampled tokens per episode; so a failure could outscore a success, and the "
        f"policy would learn the parts instead of the problem. Lower the weights or the limits (sampling.max_turns, "
        f"environment.tools.max_calls_per_turn), or insist with reward.allow_undominated: true, which the lineage "
        f"then says"
    )
