"""Losses: pure functions of log-probs, one value a sampled token. Shapes: M sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    policy_logp_M: Tensor, sampler_logp_M: Tensor, advantage_M: Tensor, *, low: float, high: float
) -> Tensor:
    """−min(r·A, clip(r, 1−low, 1+high)·A) of each token, r = exp(policy_logp − sampler_logp); returns [M].

    A ratio outside the band earns, and loses, no more than at its edge; a separate upper bound leaves unlikely tokens
    room to grow. Source: PPO, arXiv:1707.06347 eq. 7; separate bounds: DAPO, arXiv:2503.14476 eq. 10.
    """
    ratio_M = (policy_logp_M - sampler_logp_M).exp()
    return -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - low, 1 + high) * advantage_M)


def kl_to_reference(policy_logp_M: Tensor, reference_logp_M: Tensor) -> Tensor:
    """k3, the non-negative estimate of KL(policy ‖ reference) at each token: exp(d) − d − 1, d = reference − policy;
    [M].

    Source: Schulman, "Approximating KL divergence" (2020), as used by GRPO, arXiv:2402.03300 eq. 4.
    """
    difference_M = reference_logp_M - policy_logp_M
    return difference_M.exp() - difference_M - 1


def clip_share(
    policy_logp_M: Tensor, sampler_logp_M: Tensor, advantage_M: Tensor, *, low: float, high: float
) -> Tensor:
    """How many tokens the clip keeps from moving further: a scalar count."""
    ratio_M = (policy_logp_M - sampler_logp_M).exp()
    is_clipped = ((advantage_M > 0) & (ratio_M > 1 + high)) | ((advantage_M < 0) & (ratio_M < 1 - low))
    return is_clipped.sum()
