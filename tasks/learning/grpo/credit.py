"""Which trajectories of a group carry loss, and what each is credited with, by the settings of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tasks.core.records import Group, Trajectory
from tasks.learning.grpo.advantages import LARGEST_IN_FLOAT32, group_advantages
from tasks.learning.grpo.exploration import max_variance_subset
from tasks.learning.grpo.turn_credit import turn_advantages
from tasks.learning.shared.settings import GRPOSettings


def group_credit(group: Group, settings: GRPOSettings) -> Sequence[float | list[float]]:
    """The advantage of each trajectory, or of each of its sampled tokens; 0 where it does not carry loss."""
    rewards, counted = [score.reward for score in group.scores], carries_loss(group, settings)
    if settings.advantage == "turn_leave_one_out":
        return turn_advantages(group.trajectories, rewards, counted)
    dtype = torch.float32 if max(map(abs, rewards), default=0.0) < LARGEST_IN_FLOAT32 else torch.float64
    reward_1G, counted_1G = torch.tensor([rewards], dtype=dtype), torch.tensor([counted])
    advantages: list[float] = group_advantages(reward_1G, counted_1G, baseline=settings.advantage)[0].tolist()
    return advantages


def has_signal(group: Group, settings: GRPOSettings) -> bool:
    return any(map(np.any, group_credit(group, settings)))


def carries_loss(group: Group, settings: GRPOSettings) -> list[bool]:
    """Those that are evidence about the policy; of them the most different ones where `exploration.keep` says so."""
    evidence = [_is_evidence(trajectory, settings) for trajectory in group.trajectories]
    keep = settings.exploration.keep if settings.exploration else None
    if keep is None:
        return evidence
    numbers = [number for number, is_evidence in enumerate(evidence) if is_evidence]
    kept = max_variance_subset([group.scores[number].reward for number in numbers], keep)
    chosen = {numbers[index] for index in kept}
    return [number in chosen for number in range(len(evidence))]


def _is_evidence(trajectory: Trajectory, settings: GRPOSettings) -> bool:
    """A trajectory that a token limit cut, or that the environment lost, is no evidence about the policy."""
    is_overlong = trajectory.outcome == "overlong" and settings.filter_overlong
    return not is_overlong and not trajectory.is_lost and trajectory.num_sampled_tokens > 0
