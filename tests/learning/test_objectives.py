"""Advantages, losses and the rate schedule, with numbers one can check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.learning.advantages import group_advantages
from tasks.learning.losses import clip_share, clipped_surrogate, kl_to_reference
from tasks.learning.options import SupervisedSettings
from tasks.learning.policy import learning_rate

ALL = torch.tensor([[True, True, True, True]])


def test_an_advantage_is_the_distance_to_the_groups_mean() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    assert group_advantages(reward, ALL, scale="none").tolist() == [[0.5, -0.5, -0.5, 0.5]]


def test_with_std_scaling_it_is_in_sample_standard_deviations() -> None:
    """Rewards 1 0 0 0: mean ¼, sample std ½, so the winner is 1.5 above."""
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert group_advantages(reward, ALL, scale="std")[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_gives_exact_zeros(reward: float) -> None:
    advantages = group_advantages(torch.full((1, 4), reward), ALL, scale="std")
    assert advantages.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_a_trajectory_that_does_not_count_leaves_mean_and_std_and_gets_zero() -> None:
    """Counted rewards 1 and 0: mean ½, std √½, so ±√½; without the filter the mean would be ¼."""
    counted = torch.tensor([[True, True, False, False]])
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), counted, scale="std")
    assert advantages[0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0])


def test_a_ratio_above_the_clip_earns_only_the_clipped_gain() -> None:
    """Ratios 1.5 and 1 at advantage 2, clip 0.2: −1.2·2 and −1·2."""
    policy = torch.log(torch.tensor([1.5, 1.0]))
    loss = clipped_surrogate(policy, torch.zeros(2), torch.full((2,), 2.0), low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([-2.4, -2.0])


def test_a_bad_token_that_became_likelier_is_punished_in_full() -> None:
    """Advantage −1 at ratio 1.5: the minimum keeps the unclipped −1.5, a loss of 1.5."""
    loss = clipped_surrogate(torch.log(torch.tensor([1.5])), torch.zeros(1), torch.tensor([-1.0]), low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([1.5])


def test_the_upper_bound_is_separate() -> None:
    loss = clipped_surrogate(torch.log(torch.tensor([2.0])), torch.zeros(1), torch.tensor([1.0]), low=0.2, high=0.28)
    assert loss.tolist() == pytest.approx([-1.28])


def test_a_clipped_token_has_no_gradient() -> None:
    policy = torch.log(torch.tensor([1.5, 1.1])).requires_grad_()
    clipped_surrogate(policy, torch.zeros(2), torch.ones(2), low=0.2, high=0.2).sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1.1])


def test_clip_share_counts_only_tokens_the_clip_holds_back() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5 with advantages + − + −: the first is above with gain, the last below with loss."""
    ratios = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert clip_share(ratios, torch.zeros(4), advantages, low=0.2, high=0.2).item() == 2


def test_kl_is_zero_where_policy_and_reference_agree_and_positive_elsewhere() -> None:
    """k3 at reference/policy = 2: 2 − ln 2 − 1."""
    policy, reference = torch.zeros(2), torch.log(torch.tensor([1.0, 2.0]))
    assert kl_to_reference(policy, reference).tolist() == pytest.approx([0.0, 1 - math.log(2)])


def test_the_rate_warms_up_and_decays_linearly_to_its_share() -> None:
    settings = SupervisedSettings(
        num_steps=10, batch_size=1, learning_rate=1.0, warmup_steps=2, final_learning_rate_share=0.5, betas=[0.9, 0.98],
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    rates = [learning_rate(settings, step=step, num_steps=10) for step in (1, 2, 10)]
    assert rates == pytest.approx([0.5 * 0.95, 0.9, 0.5])
