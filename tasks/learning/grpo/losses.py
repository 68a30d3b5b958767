"""Losses: pure functions of log-probs, one value per sampled token, and the weights that add them up.

Shapes: M sampled tokens, one entry per (sequence, position); S sequences; E episodes of the step. Log-probs
are in nats: `policy_logp` of the weights in training, `old_logp` of the trainer at the start of the iteration,
`sampler_logp` of the engine. One call takes all tokens of a sequence: GSPO and sequence-level weights need them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.learning.shared.settings import Aggregation, ImportanceCorrection, KLEstimator

LARGEST_LOG_RATIO = 20.0


def ppo_loss(policy_logp_M: Tensor, old_logp_M: Tensor, advantage_M: Tensor, *, low: float, high: float) -> Tensor:
    """−min(r·A, clip(r, 1−low, 1+high)·A) of each token, r = exp(policy_logp − old_logp); returns [M].

    Source: PPO, arXiv:1707.06347 eq. 7; a separate upper bound lets unlikely tokens grow: DAPO, arXiv:2503.14476 eq.
    10.
    """
    ratio_M = _ratio(policy_logp_M - old_logp_M)
    return -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - low, 1 + high) * advantage_M)


def gspo_loss(
    policy_logp_M: Tensor, old_logp_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, *, low: float, high: float
) -> Tensor:
    """PPO's loss with one ratio per sequence, s = exp(mean over its tokens of policy_logp − old_logp); returns [M].

    The mean moves far less than one token's ratio, so the clip must be far tighter (3e-4 and 4e-4 in the paper).
    Each token's ratio is sg(s)·π/sg(π), sg the stop-gradient: where the tokens of a sequence have one advantage and one
    weight, the gradient is that of s; where they differ, each keeps its own. Source: GSPO and its token variant,
    arXiv:2507.18071 eq. 5 to 7, 13 and 14.
    """
    mean_M = _ratio(sequence_means(policy_logp_M - old_logp_M, sequence_M)).detach()
    ratio_M = mean_M * (policy_logp_M - policy_logp_M.detach()).exp()
    return -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - low, 1 + high) * advantage_M)


def cispo_loss(policy_logp_M: Tensor, old_logp_M: Tensor, advantage_M: Tensor, *, low: float, high: float) -> Tensor:
    """−sg(clip(r, 1−low, 1+high))·A·policy_logp of each token, sg the stop-gradient; returns [M].

    The clip bounds a token's weight and keeps its gradient, so rare tokens still learn. low = 1 means no lower bound,
    as in the paper's runs. Source: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5.
    """
    weight_M = _ratio(policy_logp_M - old_logp_M).clamp(1 - low, 1 + high).detach()
    return -weight_M * advantage_M * policy_logp_M


def kl_estimate(policy_logp_M: Tensor, reference_logp_M: Tensor, *, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(policy ‖ reference) at each token, d = reference_logp − policy_logp; returns [M].

    k2 = d² / 2    biased, small variance; its gradient is that of the true KL on-policy
    k3 = eᵈ − d − 1   unbiased and never negative: GRPO's choice (arXiv:2402.03300 eq. 4)
    Source: Schulman, "Approximating KL divergence", 2020. No k1 = −d: its mean gradient is zero on-policy.
    """
    difference_M = reference_logp_M - policy_logp_M
    if estimator == "k2":
        return difference_M.square() / 2
    return difference_M.exp() - difference_M - 1


def importance_weights(
    old_logp_M: Tensor, sampler_logp_M: Tensor, sequence_M: Tensor, *, correction: ImportanceCorrection, cap: float
) -> Tensor:
    """Importance weights for an engine whose log-probs differ from the trainer's; returns [M], without gradient.

    w = exp(old_logp − sampler_logp) of the token, or its product over the sequence. `truncate` is min(w, cap); `mask`
    is w where 1/cap ≤ w ≤ cap and 0 elsewhere. Source: Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025; masking: IcePop, Ring-1T, arXiv:2510.18855 eq. 5.
    """
    log_weight_M = (old_logp_M - sampler_logp_M).detach()
    if correction.startswith("sequence"):
        log_weight_M = _sequence_sums(log_weight_M, sequence_M)[sequence_M]
    weight_M = log_weight_M.exp()
    if correction.endswith("truncate"):
        return weight_M.clamp(max=cap)
    return torch.where((weight_M >= 1 / cap) & (weight_M <= cap), weight_M, 0.0)


def aggregation_weights(
    episode_length_S: Tensor, length_E: Tensor, *, aggregation: Aggregation, constant_length: int | None
) -> Tensor:
    """The weight of each token of a sequence in the loss of the optimizer step: loss = Σ_m w[sequence(m)]·loss_m.

    `episode_length_S` counts the sampled tokens of the episode that each sequence is of. `length_E` counts those of
    every episode in the WHOLE step, dropped groups included; returns [S].
    token     1 / Σ lengths                every token alike       DAPO, arXiv:2503.14476 eq. 8
    sequence  1 / (E · its episode's)      every episode alike     GRPO, arXiv:2402.03300 eq. 3
    constant  1 / (E · constant_length)    no bias by length       Dr. GRPO, arXiv:2503.20783 eq. 2
    """
    episode_length_S, num_episodes = episode_length_S.double(), len(length_E)
    if aggregation == "token":
        return torch.full_like(episode_length_S, 1.0) / length_E.double().sum().item()
    if aggregation == "sequence":
        return 1 / (num_episodes * episode_length_S)
    assert constant_length is not None, "settings require it"
    return torch.full_like(episode_length_S, 1 / (num_episodes * constant_length))


def is_clipped(log_ratio_M: Tensor, advantage_M: Tensor, *, low: float, high: float) -> Tensor:
    """Which tokens the clip of PPO and GSPO stops: above the band with a gain, below it with a loss; [M]."""
    ratio_M = log_ratio_M.exp()
    return ((advantage_M > 0) & (ratio_M > 1 + high)) | ((advantage_M < 0) & (ratio_M < 1 - low))


def has_bounded_weight(log_ratio_M: Tensor, advantage_M: Tensor, *, low: float, high: float) -> Tensor:
    """Which tokens have another weight by the clip of CISPO: outside of the band, with a gain or a loss; [M]."""
    ratio_M = log_ratio_M.exp()
    return (advantage_M != 0) & ((ratio_M > 1 + high) | (ratio_M < 1 - low))


def _ratio(log_ratio_M: Tensor) -> Tensor:
    """exp, bounded: the clip decides long before e²⁰, and an infinite ratio would make its gradient NaN."""
    return log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_means(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """At each token, the mean over its sequence; [M]."""
    length_S = torch.bincount(sequence_M).to(value_M.dtype)
    return (_sequence_sums(value_M, sequence_M) / length_S.clamp(min=1))[sequence_M]


def _sequence_sums(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    num_sequences = int(sequence_M.max()) + 1 if sequence_M.numel() else 0
    return value_M.new_zeros(num_sequences).index_add(0, sequence_M, value_M)
