"""Reward settings in one line: `shaped(format=0.2)` is one part; without any it is success alone."""

from __future__ import annotations

from typing import Any

from tasks.rewards.limits import EpisodeLimits
from tasks.rewards.settings import RewardSettings

LIMITS = EpisodeLimits(max_turns=10, max_calls=330, max_sampled_tokens=420)


def shaped(*parts: dict[str, Any], is_insisted: bool = False, **weights: float) -> RewardSettings:
    by_name = [{"name": name, "weight": weight} for name, weight in weights.items()]
    return RewardSettings.model_validate({"parts": [*parts, *by_name], "allow_undominated": is_insisted})
