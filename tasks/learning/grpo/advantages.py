"""How much better each trajectory did than the rest of its group. Shapes: N groups, G trajectories each."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tasks.core.records import EQUAL_REWARDS

Baseline = Literal["std", "mean", "leave_one_out"]
LARGEST_IN_FLOAT32 = 8.0  # above it neighbours in float32 are further apart than EQUAL_REWARDS


def group_advantages(reward_NG: Tensor, is_counted_NG: Tensor, *, baseline: Baseline) -> Tensor:
    """Reward of each trajectory against its own group; returns [N, G].

    std            A = (r − mean(r)) / std(r), sample std        GRPO, arXiv:2402.03300 eq. 3
    mean           A = r − mean(r)                               Dr. GRPO, arXiv:2503.20783
    leave_one_out  A = r − mean of the others = (r − mean(r)) · n / (n − 1)   RLOO, arXiv:2402.14740

    Trajectories cut by a token limit (`is_counted` False; DAPO, arXiv:2503.14476) do not enter n, mean or std and get
    0. A group whose rewards are all equal gets exact zeros: dividing float noise by a tiny std would give a large
    random gradient. Rewards from `LARGEST_IN_FLOAT32` on need float64.
    """
    count_N1 = is_counted_NG.sum(-1, keepdim=True)
    reward_NG = torch.where(is_counted_NG, reward_NG, 0.0)
    mean_N1 = reward_NG.sum(-1, keepdim=True) / count_N1.clamp(min=1)
    centred_NG = torch.where(is_counted_NG, reward_NG - mean_N1, 0.0)
    highest_N1 = reward_NG.masked_fill(~is_counted_NG, -math.inf).amax(-1, keepdim=True)
    lowest_N1 = reward_NG.masked_fill(~is_counted_NG, math.inf).amin(-1, keepdim=True)
    is_equal_N1 = highest_N1 - lowest_N1 < EQUAL_REWARDS
    num_others_N1 = (count_N1 - 1).clamp(min=1)
    if baseline == "std":
        std_N1 = (centred_NG.square().sum(-1, keepdim=True) / num_others_N1).sqrt()
        centred_NG = centred_NG / torch.where(is_equal_N1, 1.0, std_N1)
    elif baseline == "leave_one_out":
        centred_NG = centred_NG * count_N1 / num_others_N1
    return torch.where(is_equal_N1, 0.0, centred_NG)
