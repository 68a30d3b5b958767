"""The loss of the micro-batches of one optimizer step, and what the metrics count on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning.grpo.losses import (
    aggregation_weights,
    cispo_loss,
    gspo_loss,
    has_bounded_weight,
    importance_weights,
    is_clipped,
    kl_estimate,
    ppo_loss,
    sequence_means,
)
from tasks.learning.grpo.metrics import StepSums
from tasks.learning.shared.batching import MicroBatch, Share
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.reference import Reference
from tasks.learning.shared.settings import Autocast, GRPOSettings


@dataclass(slots=True)
class LossBatch:
    """A micro-batch with its token weights and reference; after the first step also that step's log-probs."""

    tensors: MicroBatch
    weight_M: Tensor
    reference_logp_M: Tensor | None = None
    old_logp_M: Tensor | None = None
    is_old_reference: bool = False  # its log-probs are `old_logp_M`, so nothing has computed them

    @property
    def lane(self) -> int:
        return self.tensors.lane


def loss_batches(share: Share, settings: GRPOSettings, *, dropped_lengths: Sequence[int]) -> list[LossBatch]:
    """One rank's share of an optimizer step, weighted by the denominators of the whole step."""
    of_step = torch.tensor([*share.episode_lengths, *dropped_lengths])
    weights = [
        aggregation_weights(
            batch.episode_length_S, of_step, aggregation=settings.aggregation, constant_length=settings.constant_length
        ).float()
        for batch in share.batches
    ]
    return [
        LossBatch(batch, weight_S[batch.sequence_M]) for batch, weight_S in zip(share.batches, weights, strict=True)
    ]


def note_references(
    batches: Sequence[LossBatch],
    reference: Reference,
    *,
    lanes: Lanes,
    ranks: Ranks,
    temperature: float,
    top_p: float,
    autocast: Autocast,
) -> None:
    """Note the reference's log-probs in each batch, from a forward of the reference.

    Where the reference equals the policy, as right after it moved there, no forward is needed: the log-probs that the
    first step notes of the policy are the reference's too. Not with `top_p` below 1, since the policy's are then of its
    nucleus and the reference's of the whole distribution.
    """
    if top_p == 1 and all(ranks.gather(reference.is_policy())):
        for batch in batches:
            batch.is_old_reference = True
        return
    tensors = [batch.tensors for batch in batches]
    found = reference.logps(tensors, lanes=lanes, temperature=temperature, autocast=autocast)
    for batch, logp_M in zip(batches, found, strict=True):
        batch.reference_logp_M = logp_M


def batch_loss(batch: LossBatch, policy_logp_M: Tensor, settings: GRPOSettings) -> tuple[Tensor, StepSums]:
    """Its share of the step's loss, a scalar, and what is counted. The first step notes its log-probs in `batch`."""
    tensors = batch.tensors
    sums = StepSums(tensors.num_tokens)
    if batch.old_logp_M is None:
        batch.old_logp_M = policy_logp_M.detach()
    loss_M = _policy_loss(policy_logp_M, batch.old_logp_M, tensors, settings)
    if settings.importance_correction != "none":
        loss_M = loss_M * importance_weights(
            batch.old_logp_M,
            tensors.sampler_logp_M,
            tensors.sequence_M,
            correction=settings.importance_correction,
            cap=settings.importance_cap,
        )
    reference_logp_M = batch.old_logp_M if batch.is_old_reference else batch.reference_logp_M
    if reference_logp_M is not None:
        kl_M = kl_estimate(policy_logp_M, reference_logp_M, estimator=settings.kl_estimator)
        loss_M = loss_M + settings.kl_weight * kl_M
        sums.kl = kl_M.detach().sum().item()
    if tensors.num_tokens:
        _count(policy_logp_M.detach(), batch.old_logp_M, tensors, settings, sums)
    loss = (loss_M * batch.weight_M).sum()
    sums.loss = loss.item()
    return loss, sums


def _policy_loss(policy_logp_M: Tensor, old_logp_M: Tensor, tensors: MicroBatch, settings: GRPOSettings) -> Tensor:
    low, high = settings.clip_low, settings.clip_high
    if settings.loss == "gspo":
        return gspo_loss(policy_logp_M, old_logp_M, tensors.advantage_M, tensors.sequence_M, low=low, high=high)
    loss = ppo_loss if settings.loss == "ppo" else cispo_loss
    return loss(policy_logp_M, old_logp_M, tensors.advantage_M, low=low, high=high)


def _count(
    policy_logp_M: Tensor, old_logp_M: Tensor, tensors: MicroBatch, settings: GRPOSettings, sums: StepSums
) -> None:
    """How many tokens are clipped, and the largest ratio."""
    log_ratio_M = policy_logp_M - old_logp_M
    if settings.loss == "gspo":
        log_ratio_M = sequence_means(log_ratio_M, tensors.sequence_M)
    clips = has_bounded_weight if settings.loss == "cispo" else is_clipped
    is_clipped_M = clips(log_ratio_M, tensors.advantage_M, low=settings.clip_low, high=settings.clip_high)
    sums.clipped = is_clipped_M.sum().item()
    sums.ratio_max = log_ratio_M.max().exp().item()
