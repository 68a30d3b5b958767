"""Advantages: how much better each trajectory did than the rest of its group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EQUAL_REWARDS = 1e-6  # rewards closer than this are equal


def group_advantages(reward_NG: Tensor, is_counted_NG: Tensor, *, scale: Literal["std", "none"]) -> Tensor:
    """Reward of each trajectory against its own group: A = r − mean(r), over std(r) where scale="std".

    N groups of G trajectories; returns [N, G]. Trajectories not counted (cut by a token limit, or lost to a fault of
    the environment) are left out of mean and std and get exactly 0. A group whose counted rewards are all equal gives
    exact zeros: dividing float noise by a tiny std would turn "nothing learnt" into a large random gradient. The std
    is the sample standard deviation. Source: GRPO, arXiv:2402.03300 eq. 3; scale="none" is Dr. GRPO, arXiv:2503.20783;
    the filter is DAPO, arXiv:2503.14476.
    """
    count_N1 = is_counted_NG.sum(-1, keepdim=True)
    reward_NG = torch.where(is_counted_NG, reward_NG, 0.0)
    mean_N1 = reward_NG.sum(-1, keepdim=True) / count_N1.clamp(min=1)
    centred_NG = torch.where(is_counted_NG, reward_NG - mean_N1, 0.0)
    is_equal_N1 = centred_NG.abs().amax(-1, keepdim=True) < EQUAL_REWARDS
    if scale == "std":
        std_N1 = (centred_NG.square().sum(-1, keepdim=True) / (count_N1 - 1).clamp(min=1)).sqrt()
        centred_NG = centred_NG / torch.where(is_equal_N1, 1.0, std_N1)
    return torch.where(is_equal_N1, 0.0, centred_NG)
