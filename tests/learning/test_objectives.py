"""Advantages, losses and the rate schedule, with numbers one can check by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from tasks.learning.grpo.advantages import Baseline, group_advantages
from tasks.learning.grpo.credit import group_credit
from tasks.learning.grpo.losses import (
    aggregation_weights,
    cispo_loss,
    gspo_loss,
    has_bounded_weight,
    importance_weights,
    is_clipped,
    kl_estimate,
    ppo_loss,
)
from tasks.learning.grpo.step_loss import batch_loss, loss_batches
from tasks.learning.shared.batching import share_of
from tasks.learning.shared.optimizer import learning_rate
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import Aggregation, ImportanceCorrection, KLEstimator
from tests.learning.options import grpo, supervised
from tests.learning.rows import a_group

ALL = torch.tensor([[True, True, True, True]])


def test_an_advantage_is_the_distance_to_the_groups_mean() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    assert group_advantages(reward, ALL, baseline="mean").tolist() == [[0.5, -0.5, -0.5, 0.5]]


def test_with_std_scaling_it_is_in_sample_standard_deviations() -> None:
    """Rewards 1 0 0 0: mean ¼, sample std ½, so the winner is 1.5 above."""
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert group_advantages(reward, ALL, baseline="std")[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    """Rewards 1 0 0 0: the winner's others average 0, each loser's ⅓."""
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    advantages = group_advantages(reward, ALL, baseline="leave_one_out")
    assert advantages[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("baseline", ["std", "mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_gives_exact_zeros(reward: float, baseline: Baseline) -> None:
    advantages = group_advantages(torch.full((1, 4), reward), ALL, baseline=baseline)
    assert advantages.tolist() == [[0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("reward", [5.1, 11.3, 20.7, 101.3, 1e30])
@pytest.mark.parametrize("size", [6, 7, 8, 12])
def test_equal_rewards_teach_nothing_however_large_they_are(reward: float, size: int) -> None:
    """In float32 the mean of seven times 20.7 is 20.700002, so each would be 0.93 standard deviations off."""
    assert group_credit(a_group(1, [reward] * size, ["failure"] * size), grpo()) == [0.0] * size


@pytest.mark.parametrize(("high", "low"), [(1e39, 0.0), (100_000.001, 100_000.0)])
def test_large_rewards_that_differ_are_compared_as_small_ones_are(high: float, low: float) -> None:
    """One of four is higher: 1.5 and −½, as for 1 0 0 0. In float32 1e39 is infinite, and the other two are equal."""
    credit = group_credit(a_group(1, [high, low, low, low]), grpo())
    assert credit == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_a_trajectory_that_does_not_count_leaves_mean_and_std_and_gets_zero() -> None:
    """Counted rewards 1 and 0: mean ½, std √½, so ±√½; without the filter the mean would be ¼."""
    counted = torch.tensor([[True, True, False, False]])
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), counted, baseline="std")
    assert advantages[0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0])


def test_a_trajectory_alone_among_those_that_count_has_nothing_to_be_compared_with() -> None:
    counted = torch.tensor([[True, False, False, False]])
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    for baseline in ("std", "mean", "leave_one_out"):
        assert group_advantages(reward, counted, baseline=baseline).tolist() == [[0.0] * 4]


def test_a_ratio_above_the_clip_earns_only_the_clipped_gain() -> None:
    """Ratios 1.5 and 1 at advantage 2, clip 0.2: −1.2·2 and −1·2."""
    policy = torch.log(torch.tensor([1.5, 1.0]))
    loss = ppo_loss(policy, torch.zeros(2), torch.full((2,), 2.0), low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([-2.4, -2.0])


def test_a_bad_token_that_became_likelier_is_punished_in_full() -> None:
    """Advantage −1 at ratio 1.5: the minimum keeps the unclipped −1.5, a loss of 1.5."""
    loss = ppo_loss(torch.log(torch.tensor([1.5])), torch.zeros(1), torch.tensor([-1.0]), low=0.2, high=0.2)
    assert loss.tolist() == pytest.approx([1.5])


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_beyond_all_floats_leaves_loss_and_gradient_finite(advantage: float) -> None:
    policy = torch.zeros(1, requires_grad=True)
    loss = ppo_loss(policy, torch.full((1,), -100.0), torch.tensor([advantage]), low=0.2, high=0.28)
    loss.sum().backward()
    assert policy.grad is not None
    assert loss.isfinite().all()
    assert policy.grad.isfinite().all()


def test_the_upper_bound_is_separate() -> None:
    loss = ppo_loss(torch.log(torch.tensor([2.0])), torch.zeros(1), torch.tensor([1.0]), low=0.2, high=0.28)
    assert loss.tolist() == pytest.approx([-1.28])


def test_a_clipped_token_has_no_gradient() -> None:
    policy = torch.log(torch.tensor([1.5, 1.1])).requires_grad_()
    ppo_loss(policy, torch.zeros(2), torch.ones(2), low=0.2, high=0.2).sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1.1])


def test_only_tokens_the_clip_holds_back_count_as_clipped() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5 with advantages + − + −: the first is above with gain, the last below with loss."""
    ratios = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert is_clipped(ratios, advantages, low=0.2, high=0.2).tolist() == [True, False, False, True]


def test_with_cispo_a_token_counts_as_clipped_where_its_weight_is_another() -> None:
    """The same four: weights 1.2, 1.2, 0.8 and 0.8 instead of the ratios. Ratio 1.1 is its own weight; without an
    advantage no weight matters.
    """
    ratios = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 1.5]))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    found = has_bounded_weight(ratios, advantages, low=0.2, high=0.2)
    assert found.tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize(("loss", "share"), [("ppo", 0.5), ("cispo", 1.0)])
def test_the_clip_share_is_of_the_loss_that_is_trained_with(loss: str, share: float) -> None:
    """Two tokens of advantage 1 whose log-probs rise and fall by 1: PPO stops the first, CISPO bounds both."""
    rows = [Row([1, 2, 3], [False, True, True], [0.0, 0.0, 0.0], 1.0)]
    device = torch.device("cpu")
    batches = share_of([rows], packing="tree", max_tokens=10, device=device, rank=0, num_ranks=1, num_lanes=1)
    settings = grpo(loss=loss, kl_weight=0.0, clip_low=0.2, clip_high=0.2)
    (batch,) = loss_batches(batches, settings, dropped_lengths=[])
    batch.old_logp_M = torch.tensor([-2.0, -2.0])
    _, sums = batch_loss(batch, torch.tensor([-1.0, -3.0]), settings)
    assert sums.metrics()["clip_share"] == share


def test_kl_is_zero_where_policy_and_reference_agree_and_positive_elsewhere() -> None:
    """k3 at reference/policy = 2: 2 − ln 2 − 1."""
    policy, reference = torch.zeros(2), torch.log(torch.tensor([1.0, 2.0]))
    assert kl_estimate(policy, reference, estimator="k3").tolist() == pytest.approx([0.0, 1 - math.log(2)])


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    """Trajectory 0 has token ratios 4 and 1, so 2, clipped to 1.5 at advantage 1; trajectory 1 has ratio 0.5 at −1,
    clipped to 0.8: the minimum keeps −0.8.
    """
    policy, trajectory = torch.log(torch.tensor([4.0, 1.0, 0.5])), torch.tensor([0, 0, 1])
    loss = gspo_loss(policy, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), trajectory, low=0.2, high=0.5)
    assert loss.tolist() == pytest.approx([-1.5, -1.5, 0.8])


@pytest.mark.parametrize(
    ("advantage", "gradient"),
    [([1.0, 1.0], [-1.2, -1.2]), ([1.0, -1.0], [-1.2, 1.2]), ([1.0, 0.0], [-1.2, 0.0])],
    ids=["one credit", "credit per turn", "a masked token"],
)
def test_under_a_ratio_per_sequence_each_token_keeps_its_own_credit(
    advantage: list[float], gradient: list[float]
) -> None:
    """Token ratios 1.44 and 1, so 1.2, within the clip: the gradient of a token is −1.2·A. With the mean's own gradient
    each would have that of the mean advantage, and a good and a bad turn would cancel.
    """
    policy = torch.log(torch.tensor([1.44, 1.0])).requires_grad_()
    loss = gspo_loss(policy, torch.zeros(2), torch.tensor(advantage), torch.tensor([0, 0]), low=0.5, high=0.5)
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx(gradient)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    """Ratio 3 is weighted 1.5, ratio 1 weighted 1, at advantage 2: the gradient of −w·A·logp is −w·A."""
    policy = torch.log(torch.tensor([3.0, 1.0])).requires_grad_()
    loss = cispo_loss(policy, torch.zeros(2), torch.full((2,), 2.0), low=1.0, high=0.5)
    assert loss.tolist() == pytest.approx([-1.5 * 2 * math.log(3), 0.0])
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-3.0, -2.0])


@pytest.mark.parametrize(("estimator", "expected"), [("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))])
def test_kl_estimates_at_a_reference_twice_as_likely(estimator: KLEstimator, expected: float) -> None:
    """d = ln 2: k2 = d²/2, k3 = 2 − ln 2 − 1."""
    value = kl_estimate(torch.zeros(1), torch.log(torch.tensor([2.0])), estimator=estimator)
    assert value.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_every_estimator_holds_the_policy_to_the_reference(estimator: KLEstimator) -> None:
    """The expected gradient on-policy, over all of four tokens, points away from the reference: a step against it
    lowers the true KL.
    """
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5], requires_grad=True)
    reference = torch.tensor([0.5, -0.5, 0.0, 1.0]).log_softmax(-1)
    policy = logits.log_softmax(-1)
    loss = (policy.exp().detach() * kl_estimate(policy, reference, estimator=estimator)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    (true,) = torch.autograd.grad((logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum(), logits)
    assert torch.dot(gradient, true) > 0.5 * true.norm() ** 2


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("token_truncate", [2.0, 0.25, 1.0]),
        ("token_mask", [0.0, 0.0, 1.0]),
        ("sequence_truncate", [1.0, 1.0, 1.0]),
        ("sequence_mask", [1.0, 1.0, 1.0]),
    ],
)
def test_importance_weights_at_token_and_sequence_level(
    correction: ImportanceCorrection, expected: list[float]
) -> None:
    """Token weights 4 and ¼ in one trajectory (product 1), 1 in another; cap 2, so the band is ½ to 2."""
    old, trajectory = torch.log(torch.tensor([4.0, 0.25, 1.0])), torch.tensor([0, 0, 1])
    weights = importance_weights(old, torch.zeros(3), trajectory, correction=correction, cap=2.0)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token", [0.25, 0.25]), ("sequence", [0.5, 1 / 6]), ("constant", [0.05, 0.05])]
)
def test_aggregation_weights_of_two_trajectories_of_one_and_three_tokens(
    aggregation: Aggregation, expected: list[float]
) -> None:
    """By token 1/4 each; by sequence 1/(2·1) and 1/(2·3); by a constant length of 10, 1/(2·10)."""
    length = torch.tensor([1, 3])
    weights = aggregation_weights(length, length, aggregation=aggregation, constant_length=10)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 0.95, 0.75, 0.55]),
        ("cosine", [0.5, *(0.5 + 0.25 * (1 + math.cos(math.pi * done)) for done in (0.1, 0.5, 0.9))]),
    ],
)
def test_the_rate_warms_up_and_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    """Ten steps, two of warm-up, down towards half the peak; the first, the second, the sixth and the last."""
    settings = supervised(learning_rate=1.0, warmup_steps=2, final_learning_rate_share=0.5, schedule=schedule)
    rates = [learning_rate(settings, step=n, position=n - 1, num_steps=10) for n in (1, 2, 6, 10)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_no_step_is_taken_at_rate_zero(schedule: str) -> None:
    settings = supervised(learning_rate=1.0, final_learning_rate_share=0.0, schedule=schedule)
    assert all(learning_rate(settings, step=n + 1, position=n, num_steps=5) > 0.09 for n in range(5))
